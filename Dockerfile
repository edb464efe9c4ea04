# eagle_kit on a machine with NVIDIA GPUs:
#
#     docker build -t eagle-kit .
#     docker run --gpus all --rm -p 8000:8000 -v "$PWD/work:/work" eagle-kit serve TARGET --host 0.0.0.0
#
# This file has not been built: no machine of this project could fetch the base image. The same packages were installed
# and tried without Docker, with torch's CPU build, in the versions of constraints.txt.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04

# Triton compiles its launchers, and torch the operations for CPUs, when they are first used.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/eagle-kit PATH=/opt/eagle-kit/bin:$PATH
RUN python3 -m venv "$VIRTUAL_ENV"

# torch's CUDA build brings CUDA's libraries; it changes seldom, so it is a layer of its own.
COPY constraints.txt /src/
RUN pip install --no-cache-dir --constraint /src/constraints.txt torch triton

COPY pyproject.toml setup.py README.md LICENSE /src/
COPY configs /src/configs
COPY eagle_kit /src/eagle_kit
RUN pip install --no-cache-dir --constraint /src/constraints.txt "/src[serve,train,eval]"

# Caches, runs and models lie in the folder that is mounted.
RUN useradd --create-home --uid 1001 eagle && mkdir /work && chown eagle /work
USER eagle
WORKDIR /work
ENV HF_HOME=/work/.cache/huggingface EAGLE_KIT_CACHE=/work/.cache/eagle_kit
EXPOSE 8000
ENTRYPOINT ["eagle-kit"]
CMD ["doctor"]
