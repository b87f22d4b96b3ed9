package driver

import (
	"fmt"
	"net/http"
	"strings"
	"sync"

	"k8s.io/component-base/metrics/legacyregistry"
)

// stage is something that the agent reaches, and may lose again.
type stage int

const (
	// stageLedger: prepared claims are in order.
	stageLedger stage = iota
	// stageServing: the sockets for the kubelet are open.
	stageServing
	// stageRegistered: the kubelet has registered the driver.
	stageRegistered
	// stageGPUs: NVML answers and GPUs are known.
	stageGPUs
	stages
)

var stageNames = [stages]string{"ledger read", "serving the kubelet", "registered by the kubelet", "GPUs found"}

// Status is what the agent has reached.
type Status struct {
	mu      sync.Mutex
	reached [stages]bool
	// replaces tells that another agent serves, which ends when this one is ready.
	replaces bool
}

func newStatus() *Status { return &Status{} }

func (s *Status) set(st stage, reached bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reached[st] = reached
}

// setReplaces makes registration part of being ready: if the other agent ended before, the kubelet would have nobody to call.
func (s *Status) setReplaces() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replaces = true
}

// Handler serves /healthz (the process answers), /readyz (the kubelet can call) and /metrics. A node without a driver, or
// whose kubelet has not come by yet, is ready: waiting is what the agent should do, and restarting it would
// not help; but an agent that replaces another one is ready when the kubelet knows it. /readyz lists all stages.
func (s *Status) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/readyz", s.ready)
	mux.Handle("/metrics", legacyregistry.Handler())
	return mux
}

func (s *Status) ready(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	reached, replaces := s.reached, s.replaces
	s.mu.Unlock()
	var text strings.Builder
	for st, name := range stageNames {
		mark := "-"
		if reached[st] {
			mark = "+"
		}
		fmt.Fprintf(&text, "[%s] %s\n", mark, name)
	}
	if !reached[stageLedger] || !reached[stageServing] || replaces && !reached[stageRegistered] {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	fmt.Fprint(w, text.String())
}
