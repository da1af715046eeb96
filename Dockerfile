# The service, without the trainer (see .dockerignore). The torch that pip installs decides whether
# the image runs on CUDA.

# Dependencies have a stage and a layer of their own, so that a change of the code replaces neither.
FROM python:3.11-slim AS dependencies

# An additional package index for torch. PyTorch's index of CPU builds (see its install page) makes
# the image several GB smaller where the default index has CUDA builds.
ARG TORCH_INDEX=""
# Of pyproject.toml, separated by commas; `page,onnx,ray` makes an image for Ray Serve.
ARG EXTRAS="page,onnx"

# pip stays outside the environment that it fills.
ENV PIP_PYTHON=/opt/venv/bin/python3 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

# torch comes first, with its exact version: a range may select another build. Its headers and
# programs, everybody's tests, and the bytecode of modules that the service does not import are a
# third of what pip would leave.
COPY constraints.txt pyproject.toml /tmp/
RUN python3 -m venv --without-pip /opt/venv \
 && pip install --no-compile ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
      --constraint /tmp/constraints.txt torch \
 && python3 -c "import sys, tomllib; p = tomllib.load(open('/tmp/pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *(d for e in sys.argv[1].split(',') for d in p['optional-dependencies'][e]), sep='\n')" "$EXTRAS" \
      > /tmp/requirements.txt \
 && pip install --no-compile --constraint /tmp/constraints.txt --requirement /tmp/requirements.txt \
 && cd /opt/venv/lib/python3*/site-packages \
 && rm -r torch/include \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && find . -type d \( -name test -o -name tests \) -prune -exec rm -r {} + \
 && /opt/venv/bin/python3 -c "import fastapi, httpx, isal, jaxtyping, monai.networks.nets, nibabel, numba, prometheus_client, pydantic_settings, rich, torch, typer, uvicorn, uvloop"

FROM dependencies AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY app app
COPY clients/python clients/python
# numba keeps compiled loops by the modification times of their sources, of which a layer keeps
# nothing below a second.
RUN pip install --constraint constraints.txt setuptools \
 && pip install --no-build-isolation --no-compile --no-deps --target /srv/code . \
 && cd /srv/code \
 && find . -exec touch --date 2020-01-01 {} + \
 && /opt/venv/bin/python3 -m compileall -q . \
 && NUMBA_CACHE_DIR=/srv/loops /opt/venv/bin/python3 -c "from app.inference import compile_loops; compile_loops()"

FROM python:3.11-slim
COPY --from=dependencies /opt/venv /opt/venv
# Triton, which CUDA builds of torch bring, compiles what launches its kernels by a C compiler.
# A new volume that is mounted at /data belongs to whom that folder belongs.
# KubeRay probes containers of Ray by wget; older versions start Ray by a login shell, whose PATH is
# its own.
RUN useradd --uid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin landmarkd \
 && install --directory --owner landmarkd --group landmarkd --mode 700 /data \
 && if [ -d /opt/venv/lib/python3*/site-packages/triton ]; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi \
 && if [ -e /opt/venv/bin/ray ]; then \
      apt-get update && apt-get install --yes --no-install-recommends wget \
      && rm -rf /var/lib/apt/lists/* \
      && ln -s /opt/venv/bin/ray /usr/local/bin/; \
    fi
COPY --from=build /srv /srv
COPY models /srv/landmarkd/models

USER landmarkd
WORKDIR /srv/landmarkd
ENV PYTHONPATH=/srv/code \
    PATH=/srv/code/bin:/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/tmp/loops \
    TRITON_CACHE_DIR=/tmp/triton \
    LANDMARKD_HOST=0.0.0.0 \
    LANDMARKD_PORT=8000 \
    LANDMARKD_MODELS_DIR=/srv/landmarkd/models
EXPOSE 8000
# Liveness only: a service whose models are refused keeps running and reports why at /readyz. Not
# through a proxy, which Docker puts into the environment of containers where it is set to.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
  CMD ["python3", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:' + os.environ['LANDMARKD_PORT'] + '/livez', timeout=2)"]
# numba reads compiled loops only from a writable folder, and all but /tmp may be read-only. On a
# processor unlike the one that built the image, they are compiled again.
CMD ["sh", "-c", "cp -r /srv/loops /tmp/ 2>/dev/null; exec landmarkd serve"]
