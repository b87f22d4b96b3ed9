// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-base/metrics/legacyregistry"
)

// stage is something that the agent reaches, and may lose again.
type stage int

const (
	// stageLedger: prepared claims are in order, and the ledger can be read.
	stageLedger stage = iota
	// stageFolders: what claims need can be written.
	stageFolders
	// stageServing: the sockets for the kubelet are open, and it is this agent that answers there.
	stageServing
	// stageRegistered: the kubelet has registered the driver.
	stageRegistered
	// stageAlone: no other plugin serves the driver's name, so that it is this agent whom the kubelet calls.
	stageAlone
	// stageGPUs: NVML answers and GPUs are known.
	stageGPUs
	// stageAccepted: the API server does not refuse the agent. That it is away is no refusal.
	stageAccepted
	// stagePublishes: of the agents of this node it is this one that publishes, and it can.
	stagePublishes
	stages
)

var stageNames = [stages]string{
	"ledger read", "folders writable", "serving the kubelet", "registered by the kubelet", "no rival plugin", "GPUs found",
	"accepted by the API server",
	"publishes the node's ResourceSlices",
}

// registerGrace is how long the kubelet has to register a driver that it has not registered before.
const registerGrace = time.Minute

// problem is why the agent cannot do its work. Reason is one word for taints, conditions and events.
type problem struct{ reason, message string }

// The reasons why an agent is not ready.
const (
	reasonStarting         = "Starting"
	reasonLedgerUnreadable = "LedgerUnreadable"
	reasonFolderFull       = "FolderFull"
	reasonFolderReadOnly   = "FolderReadOnly"
	reasonFolderUnwritable = "FolderNotWritable"
	reasonProgramMissing   = "ProgramMissing"
	reasonSocketMissing    = "SocketMissing"
	reasonSocketTaken      = "SocketTaken"
	reasonSocketSilent     = "SocketDoesNotAnswer"
	reasonNotRegistered    = "NotRegistered"
	reasonRivalPlugin      = "RivalPlugin"
	reasonUnauthorized     = "Unauthorized"
	reasonForbidden        = "Forbidden"
	reasonSlicesInvalid    = "SlicesInvalid"

	// With these it is ready all the same, as without GPUs: in an update the other agent ends once this one is.
	reasonOtherPublishes = "OtherAgentPublishes"
	reasonNotPublished   = "NotPublished"
)

// Status is what the agent has reached.
type Status struct {
	mu      sync.Mutex
	reached [stages]bool
	// why a stage is not reached, or lost again; empty for one that is not reached yet.
	why [stages]problem
	// needsKubelet: it is not enough that the kubelet may come by. Another agent serves, which ends when this one is ready; or the kubelet
	// has refused the driver; or it had registered it, and the socket by which it did was lost.
	needsKubelet bool
	// serving is when the agent began to, and stopping tells that it does so no more.
	serving  time.Time
	stopping bool
}

func newStatus() *Status {
	s := &Status{}
	s.reached[stageAlone], s.reached[stageAccepted] = true, true
	return s
}

func (s *Status) set(st stage, reached bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st == stageServing && reached && s.serving.IsZero() {
		s.serving = time.Now()
	}
	s.reached[st], s.why[st] = reached && !(st == stageServing && s.stopping), problem{}
}

// stop takes serving back for good.
func (s *Status) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopping, s.reached[stageServing] = true, false
}

// ends tells whether the agent has been asked to stop. Then another one may be ready already.
func (s *Status) ends() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopping
}

// get returns whether the stage is reached and, if it was lost, why.
func (s *Status) get(st stage) (reached bool, why problem) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reached[st], s.why[st]
}

// fail takes the stage back, and says why.
func (s *Status) fail(st stage, reason, message string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reached[st], s.why[st] = false, problem{reason, message}
	if st == stageRegistered {
		s.needsKubelet = true
	}
}

// setReplaces makes registration part of being ready: if the other agent ended before, the kubelet would have nobody to call.
func (s *Status) setReplaces() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.needsKubelet = true
}

// notReady returns the first reason why the agent cannot do its work; nil if it can. A node without a driver, or whose kubelet has not
// come by yet, is ready: waiting is what the agent should do.
func (s *Status) notReady() *problem {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notReadyLocked()
}

func (s *Status) notReadyLocked() *problem {
	for _, st := range []stage{stageLedger, stageFolders, stageServing, stageAlone} {
		if !s.reached[st] {
			return s.problemOf(st, problem{reasonStarting, "the agent is starting or stopping"})
		}
	}
	if !s.reached[stageRegistered] && (s.needsKubelet || time.Since(s.serving) > registerGrace) {
		return s.problemOf(stageRegistered, problem{reasonNotRegistered, "the kubelet has not registered the driver"})
	}
	if !s.reached[stageAccepted] {
		return s.problemOf(stageAccepted, problem{})
	}
	return nil
}

// refused notes that the API server has refused the agent's token, or its right to publish. Other errors say nothing of either.
func (s *Status) refused(err error) {
	switch {
	case apierrors.IsUnauthorized(err):
		s.fail(stageAccepted, reasonUnauthorized, fmt.Sprintf("the API server refuses the agent's token: %v", err))
	case apierrors.IsForbidden(err):
		s.fail(stageAccepted, reasonForbidden, fmt.Sprintf("the API server does not let the agent publish ResourceSlices: %v", err))
	}
}

// accepted ends a refusal for that reason.
func (s *Status) accepted(reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.why[stageAccepted].reason == reason {
		s.reached[stageAccepted], s.why[stageAccepted] = true, problem{}
	}
}

func (s *Status) problemOf(st stage, otherwise problem) *problem {
	if s.why[st] != (problem{}) {
		otherwise = s.why[st]
	}
	return &otherwise
}

// Handler serves /healthz (the process answers), /readyz (the kubelet can call, and claims can be prepared) and /metrics. Nothing that
// /readyz tests is mended by a restart of the agent, so it is no liveness probe. It lists all stages, and why one is not reached.
//
// Metrics and reasons name claims, pods and folders. They are for requests for which check gives http.StatusOK; another one is the
// status of the answer.
func (s *Status) Handler(check func(*http.Request) int) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) { s.ready(w, check(r) == http.StatusOK) })
	metrics := legacyregistry.Handler()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, r *http.Request) {
		if status := check(r); status != http.StatusOK {
			http.Error(w, http.StatusText(status), status)
			return
		}
		metrics.ServeHTTP(w, r)
	})
	return mux
}

func (s *Status) ready(w http.ResponseWriter, withReasons bool) {
	var text strings.Builder
	s.mu.Lock()
	for st, name := range stageNames {
		mark, why := "-", ""
		if s.reached[st] {
			mark = "+"
		}
		if s.why[st].message != "" && withReasons {
			why = ": " + s.why[st].message
		}
		fmt.Fprintf(&text, "[%s] %s%s\n", mark, name, why)
	}
	notReady := s.notReadyLocked()
	s.mu.Unlock()
	if notReady != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	fmt.Fprint(w, text.String())
}
