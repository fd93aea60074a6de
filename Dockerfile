# It installs what make installs, from the same requirements. For a CPU it was built and run (docs/verification.md); for CUDA it is untested.
#   docker build -t mm-dit .                                   PyTorch's CPU build
#   docker build -t mm-dit --build-arg DEVICE=cuda .           its CUDA build
#   docker run --rm -v $PWD:/runs mm-dit train digits          writes outputs/ here; add --gpus all for CUDA
FROM python:3.11-slim
ARG DEVICE=cpu
WORKDIR /opt/mindspeed_mm_dit
COPY requirements requirements
RUN if [ "$DEVICE" = cuda ]; then pip install --no-cache-dir "$(grep torch== requirements/pytorch-cpu.txt)"; \
    else pip install --no-cache-dir -r requirements/pytorch-cpu.txt; fi \
 && pip install --no-cache-dir -r requirements/base.txt -r requirements/pytorch.txt -r requirements/video.txt
COPY . .
RUN pip install --no-cache-dir --no-deps .
WORKDIR /runs
ENTRYPOINT ["mm-dit"]
CMD ["--help"]
