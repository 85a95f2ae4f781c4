# tracformer serve. Build: docker build -t tracformer .
# Run:   docker run -p 8000:8000 -e TRACFORMER_API_KEY=secret tracformer
# Your own model: docker run ... -v "$PWD/runs/my:/model:ro" tracformer /model
FROM python:3.12-slim AS build
COPY . /source
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist /source

FROM python:3.12-slim
# The index of CPU builds: the default one would add gigabytes of CUDA libraries.
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir "$(ls /dist/*.whl)[serve]" \
    && useradd --create-home --uid 1000 tracformer
USER tracformer
WORKDIR /home/tracformer
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Without a C++ compiler in the image, generation runs on PyTorch alone: see docs/kernels.md.
# Without a key in TRACFORMER_API_KEY, the server refuses to listen to other machines.
ENTRYPOINT ["tracformer", "serve", "--host", "0.0.0.0", "--port", "8000"]
