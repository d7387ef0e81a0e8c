# One image for all four processes; the command decides which one a container is.
FROM python:3.11-slim

# Which build of torch is installed is the index's choice: pass the one you want, for example
#   docker compose build --build-arg PIP_ARGS="--extra-index-url <PyTorch's CPU index>"
ARG PIP_ARGS=""

RUN useradd --uid 10001 --create-home strata && install -d -o strata /cache
WORKDIR /app
COPY pyproject.toml README.md ./
# The dependencies alone first: they change seldom, and this layer is the large one.
RUN python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" \
      > requirements.txt \
    && pip install --no-cache-dir ${PIP_ARGS} -r requirements.txt
COPY gateway gateway
COPY gpu_worker gpu_worker
COPY cpu_worker cpu_worker
COPY stager stager
COPY shared shared
RUN pip install --no-cache-dir --no-deps .
USER strata
EXPOSE 8080
CMD ["strata", "serve", "--host", "0.0.0.0"]
