"""Packaging: the package, its commands, the core dependencies and the extras."""

from pathlib import Path

from setuptools import find_packages, setup

# docs/reference/versions.md: with newer ones, which are not tested yet, Towers warns.
TENSORFLOW = ">=2.19,<3"
CORE = [
    f"tensorflow{TENSORFLOW}",
    "keras>=3.10,<4",
    # Older ones cannot read what they wrote with protobuf 7, which TensorFlow allows.
    "tensorflow-datasets>=4.9.10,<5",
    # Towers imports these, too. TensorFlow, Keras and TensorFlow Datasets ask for them,
    # some of narrower ranges.
    "absl-py>=2.1,<3",
    "grpcio>=1.60,<2",
    "h5py>=3.11,<4",
    "numpy>=1.26,<3",
    "packaging>=23",
    "protobuf>=5",
    "requests>=2.31,<3",
    "tqdm>=4.66,<5",
    # TensorFlow has not pulled it in since 2.21.
    "tensorboard>=2.19,<3",
    # Draws pictures for it; TensorBoard depends on it, too.
    "pillow>=11,<14",
    # The proxy behind `multi_gpu_model`; TensorFlow depends on it too.
    "wrapt>=1.14,<3",
    # What the device report reads; TensorFlow Datasets depends on the first, too, and
    # the second is small and pure Python.
    "psutil>=6,<8",
    "nvidia-ml-py>=12.535,<14",
    # Reads addresses such as s3://; TensorFlow Datasets depends on it, too.
    "fsspec>=2024.2",
    # TensorFlow Datasets imports it, and forgets to ask for it.
    "importlib_resources>=6,<8",
    # Reads tables; TensorFlow Datasets asks for it, too.
    "pyarrow>=20",
]

# TensorFlow Datasets asks for both, of any version, the first on Linux only.
ARRAY_RECORD = ["array-record>=0.8,<1"]
# Each version is for one of TensorFlow, which it asks for; none for Python 3.14 yet.
TEXT = ["tensorflow-text>=2.19,<3; sys_platform == 'linux' and python_version < '3.14'"]
# Its own requirement, huggingface-hub, is for downloads, which Towers never asks for.
TOKENIZERS = ["tokenizers>=0.21,<1"]
DALI = ["nvidia-dali-cuda120>=2.4,<3; sys_platform == 'linux'"]
MPI = ["mpi4py>=4,<5"]
# Read s3://, gs:// and az:// for fsspec, and https://.
CLOUD = ["s3fs>=2024.2", "gcsfs>=2024.2", "adlfs>=2024.2", "aiohttp>=3.9,<4"]
# Draws what --plot and towers.report show.
PLOTS = ["matplotlib>=3.10,<4"]
REPORT = ["jinja2>=3.1,<4", "markupsafe>=2.1,<4", *PLOTS]
# TensorBoard's page for what --profile_steps records.
PROFILE = ["xprof>=2.24,<2.25"]
# Its wheel has the data of examples/, and photographs for tests and benchmarks.
EXAMPLES = ["scikit-learn>=1.5,<2"]

# The Dockerfile installs the dependencies before this file is there.
README = Path(__file__).with_name("README.md")

setup(
    # The package index has another project that is named towers.
    name="keras-towers",
    version="0.3.0",
    description="Multi-tower training for TensorFlow and Keras: as on one big device.",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The Towers authors",
    # SPDX names; classifiers of licenses are deprecated. The second is that of the data
    # beside input_pipeline/sources/tfds/digits.py.
    license="Apache-2.0 AND CC-BY-4.0",
    license_files=["LICENSE"],
    keywords="keras tensorflow multi-gpu data-parallel multi_gpu_model towers",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA :: 12",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.15",
    # `towers` holds links to `input_pipeline` and `models`: installed at the top level,
    # they would take names that users have in their own projects.
    packages=find_packages(include=["towers*"]),
    package_data={
        "": ["*.pyi", "py.typed"],
        "towers.input_pipeline.sources.tfds": ["digits.npz"],
        "towers.report": ["page.html"],
    },
    entry_points={"console_scripts": ["towers = towers.__main__:main"]},
    install_requires=CORE,
    extras_require={
        "dev": [
            # What is tested, as towers/keras_adapter/versions.py has it.
            "tensorflow<2.23",
            "keras<3.16",
            "pytest>=9,<10",
            "pytest-xdist>=3.6,<4",
            "pytest-timeout>=2.3,<3",
            "ruff>=0.14,<0.18",
            *ARRAY_RECORD,
            *TEXT,
            *TOKENIZERS,
            *REPORT,
            *PROFILE,
            *MPI,
            *EXAMPLES,
            # A server of s3:// on this machine, to test it with.
            *CLOUD,
            "moto[server]>=5,<6",
            # An MPI to test it with, also on machines that have none.
            "openmpi>=5,<6; sys_platform == 'linux'",
            # Reads the manifest for Kubernetes in examples/.
            "pyyaml>=6,<7",
            # Run the notebooks in examples/.
            "nbclient>=0.10,<1",
            "ipykernel>=6.29,<8",
            # Drives Debian's Chromium, in tests and screenshots of pages.
            "playwright>=1.55,<2",
        ],
        # CUDA's libraries, as NVIDIA's wheels; there are none for macOS.
        "gpu": [f"tensorflow[and-cuda]{TENSORFLOW}"],
        "array_record": ARRAY_RECORD,
        # From before the core had pyarrow; until Towers 0.4.
        "parquet": [],
        "text": TEXT,
        "cloud": CLOUD,
        # --tokenizer=hf:tokenizer.json
        "tokenizers": TOKENIZERS,
        # Trained models: --model=hub:PRESET.
        "hub": ["keras-hub>=0.32,<0.33"],
        "examples": EXAMPLES,
        "plots": PLOTS,
        "report": REPORT,
        "profile": PROFILE,
        # --decode_on=gpu
        "dali": DALI,
        # Connects hosts that mpirun has started, with any MPI that is there.
        "mpi": MPI,
        # Starts hosts on its cluster, towers launch --launcher=ray, and runs, towers
        # queue: Ray Train brings what Ray Tune needs.
        "ray": ["ray[default,train]>=2.60,<3"],
        # Makes the site of `make docs`.
        "docs": ["mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1,<2"],
        # What peers in scripts/bench_towers.py need, and its plot.
        "bench": [
            "jax>=0.10,<0.11",
            "torch>=2.14,<3",
            "tf_keras>=2.21,<2.22",
            *PLOTS,
            *EXAMPLES,
            # What peers in scripts/bench_input.py need, and its photographs.
            "torchvision>=0.29,<1",
            *DALI,
            "grain>=0.2.18,<0.3",
            "simplejpeg>=1.9,<2",
            "opencv-python-headless>=4.13,<6",
            "scikit-image>=0.25,<0.27",
        ],
    },
)
