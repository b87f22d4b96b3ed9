# The images that the manifests name, one stage each: `make images`. Each base is given by its digest, as in
# --build-arg GO_IMAGE=golang:1.26.11-bookworm@sha256:…; there is no default, because a tag can be another image tomorrow.

# Go, on the Debian of BASE_IMAGE, so that a program finds the C library that it was linked with: golang:1.26.11-bookworm.
ARG GO_IMAGE
# A base for a program that needs nothing: gcr.io/distroless/static-debian12.
ARG STATIC_IMAGE
# A base that has the C library, and no shell: gcr.io/distroless/base-nossl-debian12.
ARG BASE_IMAGE

FROM ${GO_IMAGE} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd cmd
COPY internal internal
COPY pkg pkg
ARG LDFLAGS=
# NVIDIA's header marks old NVML calls as deprecated; the bindings still wrap them.
ENV CGO_CFLAGS=-Wno-deprecated-declarations
RUN CGO_ENABLED=0 go build -trimpath -ldflags "${LDFLAGS}" -o /out/ ./cmd/scheduler
# The agent opens the driver's library. It cannot simulate GPUs.
RUN CGO_ENABLED=1 go build -trimpath -tags nosim -ldflags "${LDFLAGS}" -o /out/ ./cmd/node-agent

# The program that prepares containers, of the version of the library that the agent writes specifications with. The host's container runtime runs it,
# whatever C library the host has.
RUN CGO_ENABLED=1 GOBIN=/out go install -trimpath -tags netgo,osusergo -ldflags '-s -w -linkmode external -extldflags "-static"' \
    github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook@"$(go list -m -f '{{.Version}}' github.com/NVIDIA/nvidia-container-toolkit)"

FROM build AS build-simulated
ARG LDFLAGS=
RUN CGO_ENABLED=1 go build -trimpath -ldflags "${LDFLAGS}" -o /out/simulated/ ./cmd/node-agent ./cmd/nvmlsimctl

FROM build AS build-kubectl-stowage
# What it checks an installation against is embedded.
COPY manifests manifests
ARG LDFLAGS=
RUN CGO_ENABLED=0 go build -trimpath -ldflags "${LDFLAGS}" -o /out/ ./cmd/kubectl-stowage

FROM ${STATIC_IMAGE} AS scheduler
COPY --from=build /out/scheduler /scheduler
USER 65532:65532
ENTRYPOINT ["/scheduler"]

# For manifests/overlays/map alone.
FROM ${STATIC_IMAGE} AS kubectl-stowage
COPY --from=build-kubectl-stowage /out/kubectl-stowage /kubectl-stowage
USER 65532:65532
ENTRYPOINT ["/kubectl-stowage"]

# The agent is root: the kubelet's and the container runtime's folders are. What it needs of the NVIDIA driver it takes from
# the host, and it runs nothing of its own image: nvidia-cdi-hook it gives to the host.
FROM ${BASE_IMAGE} AS node-agent
COPY --from=build /out/node-agent /node-agent
COPY --from=build /out/nvidia-cdi-hook /nvidia-cdi-hook
USER 0:0
ENTRYPOINT ["/node-agent"]

# For trying it out, in manifests/overlays/simulated alone: an agent that simulates GPUs, and nvmlsimctl, which commands them.
FROM ${BASE_IMAGE} AS node-agent-simulated
COPY --from=build-simulated /out/simulated/node-agent /node-agent
COPY --from=build-simulated /out/simulated/nvmlsimctl /nvmlsimctl
USER 0:0
ENTRYPOINT ["/node-agent"]
