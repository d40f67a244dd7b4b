# Towers with CUDA's libraries, which come by pip: the host needs NVIDIA's driver and the
# NVIDIA Container Toolkit. docs/reference/gpus.md says how to run it.
FROM python:3.12-slim
# --build-arg EXTRAS= leaves out CUDA: the image is smaller by gigabytes, and uses no GPU.
ARG EXTRAS=gpu
# The dependencies are kept while these files stay as they are.
COPY setup.py pyproject.toml LICENSE /source/
RUN pip install --no-cache-dir "/source${EXTRAS:+[$EXTRAS]}"
COPY . /source
RUN pip install --no-cache-dir --no-deps /source
# For kernels that the driver compiles.
ENV CUDA_CACHE_MAXSIZE=4294967296
# Runs and data are in folders of it, /towers/runs and /towers/data: mount volumes there.
WORKDIR /towers
ENTRYPOINT ["python", "-m"]
CMD ["towers.train"]
