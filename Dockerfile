# docker build -t specguard . && docker run --rm -v specguard-runs:/home/specguard/runs specguard
FROM python:3.11-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home specguard
USER specguard
WORKDIR /home/specguard
RUN mkdir runs
COPY --chown=specguard Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY --chown=specguard src ./src
ENV PIP_NO_CACHE_DIR=1
RUN make .venv/.core
CMD ["make", "demo"]
