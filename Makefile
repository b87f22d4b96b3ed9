# The front door. `make help` lists every target; CI runs the same ones.

GO        ?= go
TOOL      := $(GO) tool -modfile=tools/go.mod
# The version that our binaries print. kube-scheduler's clients parse it, so it
# starts with the Kubernetes version that the scheduler is built from.
KUBE      := $(shell $(GO) list -m -f '{{.Version}}' k8s.io/kubernetes 2>/dev/null)
REVISION  := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
# The project's own version, from the newest tag: docs/releasing.md.
VERSION   ?= $(shell git describe --tags --match 'v0.*' --dirty 2>/dev/null || echo v0.0.0-$(REVISION))
LDFLAGS   := -X k8s.io/component-base/version.gitVersion=$(KUBE)+stowage.$(REVISION) \
             -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37 \
             -X stowage.dev/stowage/internal/version.release=$(VERSION)

# NVIDIA's header marks old NVML calls as deprecated; the bindings still wrap them.
export CGO_CFLAGS += -Wno-deprecated-declarations

.DEFAULT_GOAL := help

.PHONY: help
help: ## List every target with a line
	@awk 'BEGIN {FS = ":.*## "} /^[a-z][a-z0-9-]*:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
# The revision is in LDFLAGS. Go's own stamp would fail the build where git refuses the folder because it is somebody else's.
build: ## Build bin/scheduler, bin/node-agent, bin/kubectl-stowage (docs/kubectl.md), and bin/nvmlsimctl, which commands simulated GPUs
	$(GO) build -buildvcs=false -ldflags '$(LDFLAGS)' -o bin/ ./cmd/scheduler ./cmd/node-agent ./cmd/kubectl-stowage ./cmd/nvmlsimctl

WEB       := pkg/livemap/web

.PHONY: map-page
map-page: ## Build the page of kubectl stowage map from its sources, to be committed (npm; 'make build' needs none)
	cd $(WEB) && npm ci --no-audit --no-fund && npm run build

.PHONY: map-page-check
map-page-check: map-page ## Whether the page that is committed is the one that its sources give (npm)
	@git diff --exit-code --stat -- $(WEB) && test -z "$$(git ls-files --others --exclude-standard -- $(WEB))" || \
		{ echo "the page differs from what its sources give: run 'make map-page' and commit what it writes"; exit 1; }

.PHONY: nvml-library
nvml-library: ## Build bin/nvml/libnvidia-ml.so.1: simulated GPUs for any program that loads NVML (docs/simulation.md; C compiler)
	$(GO) build -buildvcs=false -buildmode=c-shared -ldflags '-extldflags=-Wl,-soname,libnvidia-ml.so.1' -o bin/nvml/libnvidia-ml.so.1 ./cmd/nvmlsim-library

# What builds images: the first of these that works. BUILDER=podman asks for one.
BUILDER   ?= docker podman buildah
IMAGE_TAG ?= dev
# node-agent-simulated is the one of the overlay simulated, kubectl-stowage that of the overlay map.
IMAGES    ?= scheduler node-agent
# The bases of the images, which the Dockerfile explains, by digest: NAME:TAG@sha256:…
GO_IMAGE     ?=
STATIC_IMAGE ?=
BASE_IMAGE   ?=

.PHONY: images
images: ## Build images by docker, podman or buildah (IMAGE_TAG=dev IMAGES='scheduler node-agent'; GO_IMAGE=, STATIC_IMAGE=, BASE_IMAGE= by digest)
	@for base in 'GO_IMAGE=$(GO_IMAGE)' 'STATIC_IMAGE=$(STATIC_IMAGE)' 'BASE_IMAGE=$(BASE_IMAGE)'; do case "$$base" in *@sha256:????????????????????????????????????????????????????????????????) ;; \
		*) echo "$$base: want an image with its digest, NAME:TAG@sha256:…, which 'docker buildx imagetools inspect NAME:TAG' tells; the Dockerfile has the names"; exit 1;; esac; done
	@for builder in $(BUILDER); do \
		command -v $$builder >/dev/null || { echo "$$builder: is not here"; continue; }; \
		$$builder info >/dev/null 2>&1 || { echo "$$builder: is here and does not work, '$$builder info' says why"; continue; }; \
		for image in $(IMAGES); do \
			$$builder build --target $$image --tag stowage.dev/$$image:$(IMAGE_TAG) --build-arg "LDFLAGS=$(LDFLAGS)" \
				--build-arg GO_IMAGE=$(GO_IMAGE) --build-arg STATIC_IMAGE=$(STATIC_IMAGE) --build-arg BASE_IMAGE=$(BASE_IMAGE) . || exit 1; \
		done; exit 0; \
	done; echo "make images: no image is built, because none of these works: $(BUILDER)"; exit 1

.PHONY: binaries
binaries: ## Build the real control plane and node from Go modules, once, into the user's cache
	$(GO) run ./internal/localcluster/binaries

.PHONY: demo
demo: build nvml-library ## Start a real cluster, run GPU pods in it, show what each container sees (root: with a real node)
	$(GO) run ./test/demo

.PHONY: demo-hollow
demo-hollow: build ## The demo as it is without root: hollow nodes only, which start no containers
	$(GO) run ./test/demo -hollow

# Arguments of the lab, for example LAB='-nodes h100,b=hgx-b200 -examples one-gpu,unsatisfiable', LAB='-hollow -examples none'.
LAB       ?=

.PHONY: lab
lab: build nvml-library ## Keep the demo's cluster up to play in, until Ctrl-C (root: with a real node; LAB='-nodes h100 -examples none')
	@$(GO) run ./test/demo -lab $(LAB)

.PHONY: test
# internal/arch is in make lint. One package more at a time than there are processors: many tests wait for an agent more than they compute.
test: ## All tests but those of the whole on a real API server or in a browser, race detector on, and of what is long a part (~12 min on two processors)
	$(GO) test -race -short -vet=off -timeout 30m -p $$(($$(nproc) + 1)) $$($(GO) list ./... | grep -v -e '/internal/arch$$' -e '/test/integration$$' -e '/test/map$$')

# The packages with tests of which -short leaves something out: rapid makes fewer draws then.
LONG       = $(sort $(patsubst %/,./%,$(dir $(shell grep -rlE --include='*_test.go' --exclude-dir=testdata --exclude-dir=integration 'testing[.]Short|rapid[.]Check' cmd internal pkg test))))

.PHONY: test-long
test-long: ## What is long in make test as a whole, without the race detector: random draws, killed processes, a control plane, builds (~4 min)
	$(GO) test -vet=off -timeout 30m $(LONG)

.PHONY: test-integration
test-integration: ## Scheduler, agent and manifests on a real API server, race detector on; and what they may do is what they do (~7 min)
	$(GO) test -race -vet=off -timeout 60m ./test/integration

.PHONY: test-map
test-map: build ## kubectl stowage map in a real browser, on a real API server (root installs Debian's chromium where there is none; ~2 min)
	$(GO) test -count=1 -v -timeout 20m ./test/map

# The packages whose concurrency is proven.
PROVEN    := $(wildcard ./pkg/tracker ./pkg/fence)

# What the plugin does at the fence and cannot be tried without it.
AT_FENCE  := ^(TestFenceClaimSharedByTwoPodsWhoseAllocatorLoses|TestFenceRestartBetweenWriteAndBind)$$

.PHONY: test-race
test-race: ## The tracker's and the fence's tests 50 times, race detector on
	$(GO) test -race -short -count=50 -timeout 60m $(PROVEN)
	$(GO) test -race -count=50 -timeout 60m -run '$(AT_FENCE)' ./pkg/plugins/deviceclaims

.PHONY: mutate
mutate: ## Break the tracker and the fence line by line: at least 90 % must be noticed (~10 min)
	$(GO) run ./internal/mutate -seeds $(PROVEN)
	$(GO) run ./internal/mutate -at-least 90 $(PROVEN)

.PHONY: mutate-rest
mutate-rest: ## Put back faults that make pods sleep or devices idle: histories, or the tests that are named, must show each (~1 h)
	$(GO) run ./internal/mutate -seeds -show -patience 5m -run 'TestScenarios$$' -random 400 ./test/liveness
	$(GO) run ./internal/mutate -seeds -patience 10m -run 'TestRest$$' -random 2000 ./pkg/agent/prepare
	$(GO) run ./internal/mutate -seeds -patience 10m -run 'TestWhatIsPublishedAtRest$$' -random 200 ./pkg/agent/driver

# Arguments of the next one, for example MUTANTS='-sample 400 -seed 7' for an estimate.
MUTANTS   ?=

.PHONY: mutate-agent
mutate-agent: ## Break what the node agent remembers, does and takes back, line by line: at least 95 % should be noticed (hours; MUTANTS='-sample 400': ~10 min a package)
	$(GO) run ./internal/mutate -at-least 95 -patience 5m $(MUTANTS) ./pkg/agent/ledger ./pkg/agent/reconcile
	$(GO) run ./internal/mutate -at-least 95 -patience 5m -temp "$(wildcard /dev/shm)" -unlisted $(MUTANTS) -tests ./pkg/agent/prepare \
		./pkg/agent/prepare ./pkg/agent/prepare/internal/steps ./pkg/agent/prepare/internal/locks

.PHONY: bench-tracker
bench-tracker: ## Events and snapshots with 1,000, 10,000 and 100,000 devices held: flat within 2x
	$(GO) test -run "^$$" -bench SnapshotAndApply ./pkg/tracker

# Which tests of make e2e, for example RUN='TestALostGPU'; all if empty. SKIP leaves tests out.
RUN       ?=
SKIP      ?=

.PHONY: e2e
e2e: build nvml-library ## End-to-end tests on a real kubelet and containerd (root; RUN='TestALostGPU')
	$(GO) test -tags e2e -p 1 -count=1 -timeout 60m -v $(if $(SKIP),-skip '$(SKIP)') $(if $(RUN),-run '$(RUN)' ./test/e2e,./test/e2e/... ./internal/localcluster/node/... ./test/demo)

# How long the tenant's pod of make hostile-mps goes on.
HOSTILE_FOR ?= 10m

.PHONY: hostile-mps
hostile-mps: build nvml-library ## A tenant's pod with MPS fills, nests and forks on a real node for HOSTILE_FOR=10m, and nobody else feels it (root; make e2e does it for 20 s)
	$(GO) test -tags e2e -count=1 -timeout 60m -v -run '^TestAHostilePodWithMPS$$' ./test/e2e -hostile-for $(HOSTILE_FOR)

.PHONY: test-gpu
test-gpu: ## Checks of what only a real GPU can answer; on a machine without one it says "not run"
	@$(GO) test -count=1 -v -run TestOnRealGPUs ./test/gpu

# Arguments of the chaos test, for example CHAOS=-short for a smoke test of about a minute, CHAOS='-seed 7'.
CHAOS     ?=

.PHONY: chaos
chaos: build ## Several schedulers on one pool while everything breaks: no device over-used, nothing leaked, no pod stuck (CHAOS=-short)
	$(GO) run ./test/chaos $(CHAOS)

# Arguments of the random histories, for example LIVENESS='-for 5m -seed 7', LIVENESS='-histories 20000'.
LIVENESS  ?= -for 1h

.PHONY: liveness
liveness: ## Random histories in virtual time: at rest, a new scheduler must have nothing to do (1 h; LIVENESS='-for 5m')
	$(GO) test -count=1 -v -timeout 0 -run 'TestRest$$' ./test/liveness $(LIVENESS)

.PHONY: liveness-ci
liveness-ci: ## The first 1,000 of these histories (~3 min). A difference that one of three plays shows is told as FLAKY and fails nothing
	$(GO) test -count=1 -v -timeout 30m -run 'TestRest$$' ./test/liveness -histories 1000 -tolerate-flaky

# Arguments of the agent's random histories, for example AGENT_REST='-histories 500 -seed 7'.
AGENT_REST ?= -histories 20000
# The same of those that look at what is published.
PUBLISHED_REST ?= -histories 500

.PHONY: agent-rest
agent-rest: ## Random histories of a node: at rest a new agent changes nothing, and all GPUs are offered that work (~20 min)
	$(GO) test -count=1 -timeout 0 -run 'TestRest$$' ./pkg/agent/prepare $(AGENT_REST)
	$(GO) test -count=1 -timeout 0 -run 'TestWhatIsPublishedAtRest$$' ./pkg/agent/driver $(PUBLISHED_REST)

.PHONY: agent-rest-ci
agent-rest-ci: ## 2,000 of these histories, and 500 of a node that shares its GPUs with another device plugin (~4 min)
	@$(MAKE) agent-rest AGENT_REST='-histories 2000' PUBLISHED_REST='-histories 50'
	$(GO) test -count=1 -timeout 30m -run 'TestNoGPUIsHandedOutTwice$$' ./pkg/agent/driver -interleavings 500

.PHONY: crash-scheduler
crash-scheduler: ## Each write of a scheduler fails in each way, with and without its end: nothing is held for nobody, nobody sleeps (~10 min)
	$(GO) test -count=1 -v -timeout 60m -run 'TestFaultMatrix$$' ./test/liveness -every 1

# Arguments of the scale test, for example SCALE='-nodes 100 -claims 500 -burst 50 -churn 10s -audit-period 5s' for a look at what it does.
SCALE     ?=

.PHONY: scale
scale: build ## 5,000 nodes, 40,000 devices, 25,000 claims: start, burst, churn, audit, restart, and what each takes (20 min at most)
	$(GO) run ./test/scale $(SCALE)

.PHONY: bench-allocator
bench-allocator: ## Measure the allocator against upstream's, and check that it has not become slower, nor allocates more per node
	$(GO) test -count=1 -run TestFilterAllocatesLittle ./pkg/allocator
	$(GO) run ./test/perf/allocator -floors test/perf/allocator/floors.json

.PHONY: bench-preemption
bench-preemption: ## Time to find victims among 104 to 8,000 pods, for a pod and for groups, beside the same framework without the plugin
	$(GO) test -run '^$$' -bench Preemption -benchtime 2x ./pkg/plugins/deviceclaims

.PHONY: bench-fence
bench-fence: build ## Measure what the fence adds to the time to bind a pod, at 500 and 5,000 nodes
	$(GO) test -run '^$$' -bench Fence ./pkg/fence
	$(GO) run ./test/perf/fence

.PHONY: bench-prepare
bench-prepare: ## Time to prepare a whole GPU with real fsync, alone and 64 at once: median and 99th percentile
	$(GO) test -run '^$$' -bench PrepareWholeGPU -benchtime 20x ./pkg/agent/prepare

# Its whole output is of use only if it fails.
.PHONY: crash
crash: ## Fail and kill prepare and unprepare at every step, and print how many steps were tried (~3 min; make test-long kills at every 5th)
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
		$(GO) test -count=1 -timeout 20m -v -run 'AtAnyStepIsRecovered|TestAnAgentThatStartsBlindRecovers' ./pkg/agent/prepare -every 1 >"$$log" 2>&1 || { cat "$$log"; exit 1; }; \
		sed -n 's/^.*: tried: //p; /^ok/p' "$$log"

.PHONY: differential
differential: ## Compare the allocator with upstream's on 20,000 random clusters, on 2,000 of each kind that is hard, and on hostile expressions
	$(GO) test -count=1 -v -timeout 60m -run 'TestDifferential|TestTheChecker|FuzzCEL' ./pkg/allocator/compat -rapid.checks=20000
	$(GO) test -count=1 -timeout 60m -run 'Upstream|TestSharedAnswers|AnotherNamespace' ./pkg/allocator -rapid.checks=2000

# How many hostile objects, and which: HOSTILE='-hostile-objects 20000 -hostile-seed 7'.
HOSTILE   ?= -hostile-objects 100000

.PHONY: hostile
hostile: ## Give the scheduler 100,000 objects at the API's extremes: no handler or attempt is long, nothing is kept (~1 h; a quiet machine)
	$(GO) test -count=1 -v -timeout 0 -run 'TestHostileObjects$$' ./test/integration $(HOSTILE)

.PHONY: hostile-ci
hostile-ci: ## The same with 2,000 objects, and limits ten times as wide (~3 min)
	@$(MAKE) hostile HOSTILE='-hostile-objects 2000'

# How much each fuzz target runs. A number of inputs, not a time: up to Go 1.26 a target whose time ends while an
# input runs may be reported as failed (go.dev/issue/75804).
FUZZTIME  ?= 30000x

.PHONY: fuzz
fuzz: ## Fuzz the allocator, and what the node agent and the simulation read (FUZZTIME=30000x: inputs per target)
	@for package in $$(grep -rl --include='*_test.go' '^func Fuzz' pkg | xargs -n 1 dirname | sort -u); do \
		targets=$$($(GO) test -list '^Fuzz' ./$$package) || { echo "$$targets"; exit 1; }; \
		for target in $$(echo "$$targets" | grep ^Fuzz); do \
			$(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 500x -timeout 60m ./$$package || exit 1; done; done

.PHONY: lint
lint: ## golangci-lint (.golangci.yml says which linters), and the order of imports
	$(TOOL) golangci-lint run
	$(GO) test -count=1 ./internal/arch

# Where govulncheck finds what is known: https://vuln.go.dev or a copy of it, which may be a folder, file:///PATH.
VULNDB    ?= https://vuln.go.dev

.PHONY: vulncheck
vulncheck: ## Known vulnerabilities in what our code calls, by govulncheck (VULNDB=: a copy of its database; else one comes through the module proxy)
	GOTOOLCHAIN=auto $(GO) run ./internal/vulncheck -db '$(VULNDB)' -- $(TOOL) govulncheck

.PHONY: fmt
fmt: ## Format the code
	$(TOOL) golangci-lint fmt

.PHONY: generate
generate: ## Run the code generators
	$(GO) generate ./...

.PHONY: release-check
release-check: ## Whether VERSION=v0.x.y can be tagged: nothing uncommitted, a section in the changelog, no such tag yet
	@echo '$(VERSION)' | grep -Eqx 'v0\.[0-9]+\.[0-9]+(-rc\.[0-9]+)?' || { echo "VERSION=$(VERSION): want v0.x.y or v0.x.y-rc.n"; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo "there is something uncommitted"; exit 1; }
	@grep -q '^## $(patsubst v%,%,$(VERSION)) ' CHANGELOG.md || { echo "CHANGELOG.md has no section '## $(patsubst v%,%,$(VERSION)) (date)'"; exit 1; }
	@! git rev-parse -q --verify 'refs/tags/$(VERSION)' >/dev/null || { echo "the tag $(VERSION) is there already"; exit 1; }
	@echo "$(VERSION) can be tagged"

# As manifests/kubectl/krew.yaml has them.
KREW      ?= linux-amd64 linux-arm64 darwin-amd64 darwin-arm64

.PHONY: krew
krew: ## In bin/krew: an archive of kubectl-stowage for each platform, and krew's manifest for VERSION=v0.x.y with their sums
	@echo '$(VERSION)' | grep -Eqx 'v0\.[0-9]+\.[0-9]+(-rc\.[0-9]+)?' || { echo "VERSION=$(VERSION): want v0.x.y or v0.x.y-rc.n"; exit 1; }
	rm -rf bin/krew && mkdir -p bin/krew
	sed 's/v0\.0\.0/$(VERSION)/' manifests/kubectl/krew.yaml >bin/krew/stowage.yaml
	set -e; for platform in $(KREW); do \
		mkdir bin/krew/$$platform && cp LICENSE bin/krew/$$platform; \
		CGO_ENABLED=0 GOOS=$${platform%-*} GOARCH=$${platform#*-} $(GO) build -buildvcs=false -trimpath -ldflags '$(LDFLAGS)' \
			-o bin/krew/$$platform/kubectl-stowage ./cmd/kubectl-stowage; \
		archive=kubectl-stowage-$$platform.tar.gz; \
		tar -czf bin/krew/$$archive -C bin/krew/$$platform kubectl-stowage LICENSE; \
		sum=$$(sha256sum bin/krew/$$archive | cut -d' ' -f1); \
		sed -i "/$$archive/{n;s/0\{64\}/$$sum/}" bin/krew/stowage.yaml; \
		grep -q "$$sum" bin/krew/stowage.yaml || { echo "manifests/kubectl/krew.yaml does not have $$archive"; exit 1; }; \
	done
	$(GO) test -vet=off -run 'TestTheManifestForKrew$$/as_it_is' ./cmd/kubectl-stowage -krew $(CURDIR)/bin/krew/stowage.yaml

.PHONY: presubmit
presubmit: lint test test-long test-integration ## What a change must pass before it is sent (CI does more: see .ci/run)

.PHONY: clean
clean: ## Remove what was built in this folder (the binary cache stays)
	rm -rf bin
