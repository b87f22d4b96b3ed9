# The images that the manifests name, one stage each: `make images`. Bases are given by tag; to pin them, give their digests,
# as in --build-arg BASE_IMAGE=debian@sha256:…

# Both are of the same Debian, so that a program finds the C library that it was linked with.
ARG GO_IMAGE=golang:1.26.8-bookworm
# All that the programs need of it is the C library; one without a shell does as well.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${GO_IMAGE} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd cmd
COPY internal internal
COPY pkg pkg
ARG LDFLAGS=
# NVIDIA's header marks old NVML calls as deprecated; the bindings still wrap them.
ENV CGO_ENABLED=1 CGO_CFLAGS=-Wno-deprecated-declarations
RUN go build -trimpath -ldflags "${LDFLAGS}" -o /out/ ./cmd/scheduler ./cmd/node-agent ./cmd/nvmlsimctl

FROM ${BASE_IMAGE} AS scheduler
COPY --from=build /out/scheduler /scheduler
USER 65532:65532
ENTRYPOINT ["/scheduler"]

# The agent is root: the kubelet's and the container runtime's folders are. What it needs of the NVIDIA driver it takes from
# the host, and it runs nothing of its own image. nvmlsimctl commands simulated GPUs.
FROM ${BASE_IMAGE} AS node-agent
COPY --from=build /out/node-agent /node-agent
COPY --from=build /out/nvmlsimctl /nvmlsimctl
USER 0:0
ENTRYPOINT ["/node-agent"]
