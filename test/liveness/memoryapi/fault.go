// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryapi

import (
	"errors"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Fault is what goes wrong with one request.
type Fault int

const (
	None     Fault = iota
	Refused        // answered with an error that is no conflict, no effect
	Conflict       // answered with a conflict, no effect
	NoAnswer       // takes effect, and the client never hears of it
	Lost           // neither effect nor answer
	Late           // no answer, and takes effect later, if its preconditions still hold then
	Slow           // takes effect, and is answered later
)

func (f Fault) String() string {
	return [...]string{"None", "Refused", "Conflict", "NoAnswer", "Lost", "Late", "Slow"}[f]
}

// How long after its request a late write takes effect, and a slow one is answered. A binding asks for no version that could be outdated,
// so the scheduler can only wait for it: two seconds, which is a documented limit.
const (
	lateBy        = 3 * time.Second
	lateBindingBy = time.Second
)

// FaultFunc decides what goes wrong with a request of a client. verb is get, create, update, patch or delete, what
// is a resource or resource/subresource.
type FaultFunc func(client, verb, what string) Fault

// SetFaults has fn asked before each request but watches.
func (s *Server) SetFaults(fn FaultFunc) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.fault = fn
}

// errNoAnswer is what a client gets for a request without an answer.
var errNoAnswer error = timeout{errors.New("context deadline exceeded (Client.Timeout exceeded while awaiting headers)")}

type timeout struct{ error }

func (timeout) Timeout() bool   { return true }
func (timeout) Temporary() bool { return true }

func (s *Server) faultFor(client, verb string, r request) Fault {
	s.mutex.Lock()
	fault := s.fault
	s.mutex.Unlock()
	if fault == nil {
		return None
	}
	return fault(client, verb, r.what())
}

func (r request) what() string {
	if r.subresource != "" {
		return r.resource.Resource + "/" + r.subresource
	}
	return r.resource.Resource
}

func (f Fault) takesEffect() bool { return f == None || f == NoAnswer || f == Slow }

func (f Fault) withoutEffect(req *http.Request, r request) (*http.Response, error) {
	switch f {
	case Refused:
		return answer(req, nil, apierrors.NewInternalError(errors.New("etcdserver: leader changed")))
	case Conflict:
		return answer(req, nil, apierrors.NewConflict(r.groupResource(), r.name, errors.New("the object has been modified")))
	case NoAnswer, Lost, Late, None, Slow: // the last two take effect
	}
	return nil, errNoAnswer
}

// later carries a write out after a while. Its client does not wait for it.
func (s *Server) later(w *write) {
	by := lateBy
	if w.subresource == "binding" {
		by = lateBindingBy
	}
	time.AfterFunc(by, func() { _, _ = w.carryOut() })
}
