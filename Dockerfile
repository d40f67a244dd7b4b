# Towers with CUDA's libraries, which come by pip: the host needs NVIDIA's driver and the
# NVIDIA Container Toolkit. docs/reference/gpus.md says how to run it.
FROM python:3.12-slim
WORKDIR /towers
# Gigabytes of packages; they are kept while these files stay as they are.
COPY setup.py pyproject.toml LICENSE ./
RUN pip install --no-cache-dir '.[gpu]'
COPY . .
# For kernels that the driver compiles.
ENV CUDA_CACHE_MAXSIZE=4294967296
RUN pip install --no-cache-dir --no-deps --editable .
ENTRYPOINT ["python", "-m"]
CMD ["towers.train"]
