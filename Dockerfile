# The service, without the trainer (see .dockerignore). The torch that pip installs decides whether
# the image runs on CUDA.
FROM python:3.11-slim

# An additional package index for torch. PyTorch's index of CPU builds (see its install page) makes
# the image several GB smaller where the default index has CUDA builds.
ARG TORCH_INDEX=""

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PATH=/opt/venv/bin:$PATH

# Dependencies in a layer of their own, so that a change of the code does not reinstall them. torch
# comes first, with its exact version: a range may select another build.
WORKDIR /srv/landmarkd
COPY constraints.txt pyproject.toml ./
RUN python3 -m venv /opt/venv \
 && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
      --constraint constraints.txt torch setuptools \
 && python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['page'], sep='\n')" \
      > /tmp/requirements.txt \
 && pip install --constraint constraints.txt --requirement /tmp/requirements.txt \
 && rm /tmp/requirements.txt \
 && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin landmarkd

COPY README.md LICENSE ./
COPY app app
COPY models models
RUN pip install --no-build-isolation --no-deps --editable . \
 && python3 -m compileall -q app \
 && NUMBA_CACHE_DIR=/srv/loops python3 -m app.inference.precompile

USER landmarkd
ENV LANDMARKD_HOST=0.0.0.0 \
    LANDMARKD_PORT=8000 \
    LANDMARKD_MODELS_DIR=/srv/landmarkd/models \
    NUMBA_CACHE_DIR=/tmp/loops
EXPOSE 8000
# Liveness only: a service whose models are refused keeps running and reports why at /readyz.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
  CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['LANDMARKD_PORT'] + '/livez', timeout=2)"]
# numba reads compiled loops only from a writable folder, and all but /tmp may be read-only. On a
# processor unlike the one that built the image, they are compiled again.
CMD ["sh", "-c", "cp -r /srv/loops /tmp/ 2>/dev/null; exec landmarkd serve"]
