# One image for CPU and CUDA: the torch that pip finds decides.
FROM python:3.11-slim

# An index that pip asks for torch besides its default one. PyTorch's own index of CPU builds makes
# the image several GB smaller on machines whose default index serves the CUDA build.
ARG TORCH_INDEX=""

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /srv/landmarkd
COPY constraints.txt pyproject.toml ./
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
      --constraint constraints.txt torch setuptools
ENV PATH=/opt/venv/bin:$PATH

COPY README.md LICENSE ./
COPY app app
COPY models models
RUN pip install --no-build-isolation --constraint constraints.txt --editable . \
 && useradd --system --uid 10001 --no-create-home landmarkd

USER landmarkd
ENV LANDMARKD_HOST=0.0.0.0 \
    LANDMARKD_PORT=8000 \
    LANDMARKD_MODELS_DIR=/srv/landmarkd/models
EXPOSE 8000
# Liveness only: a service whose models are refused stays up and says why at /readyz.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
  CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['LANDMARKD_PORT'] + '/livez', timeout=2)"]
STOPSIGNAL SIGTERM
CMD ["landmarkd", "serve"]
