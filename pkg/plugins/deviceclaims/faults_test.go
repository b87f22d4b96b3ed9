// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
)

// disturbance is what goes wrong with one request. The functions run while the API is locked.
type disturbance struct {
	// before happens instead of the request if it returns an error.
	before func(f *faultRun) error
	// after happens when a write has taken effect; an error is the answer nevertheless.
	after func(f *faultRun) error
}

// always makes a function of an error.
func always(err error) func(*faultRun) error { return func(*faultRun) error { return err } }

var (
	errReset   = errors.New("read tcp 10.0.0.1:6443: connection reset by peer")
	errTimeout = errors.New("Client.Timeout exceeded while awaiting headers")
	errBusy    = apierrors.NewTooManyRequests("the server is busy", 1)
	errServer  = apierrors.NewInternalError(errors.New("etcdserver: leader changed"))
	errGateway = apierrors.NewGenericServerResponse(http.StatusGatewayTimeout, "put", resourceapi.Resource("resourceclaims"), "", "", 0, true)
	errFormer  = apierrors.NewConflict(resourceapi.Resource("resourceclaims"), "", errors.New("the first try of this request took effect"))
	errDenied  = apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "", errors.New("the role is being replaced"))
)

// passing are the disturbances after which the pod is to get its devices as if nothing had happened.
var passing = map[string]disturbance{
	"500":                                  {before: always(errServer)},
	"500, took effect":                     {after: always(errServer)},
	"504":                                  {before: always(errGateway)},
	"504, took effect":                     {after: always(errGateway)},
	"timeout":                              {before: always(errTimeout)},
	"timeout, took effect":                 {after: always(errTimeout)},
	"timeout, takes effect later":          {before: always(errLate)},
	"connection reset":                     {before: always(errReset)},
	"connection reset, took effect":        {after: always(errReset)},
	"429":                                  {before: always(errBusy)},
	"429 to the second try, took effect":   {after: always(errBusy)},
	"conflict without a change":            {before: always(errFormer)},
	"conflict of the second try with ours": {after: always(errFormer)},
	"forbidden for a moment":               {before: always(errDenied)},
	"somebody labels the claims":           {before: func(f *faultRun) error { f.label(); return nil }},
	"somebody labels the claims after it":  {after: func(f *faultRun) error { f.label(); return nil }},
	"labelled, and the answer is lost":     {after: func(f *faultRun) error { f.label(); return errReset }},
	"context ends":                         {before: func(f *faultRun) error { f.cancel(); return context.Canceled }},
	"context ends, took effect":            {after: func(f *faultRun) error { f.cancel(); return context.Canceled }},
	"watch closes":                         {before: func(f *faultRun) error { f.h.api.closeWatchesLocked(); return nil }},
	"watch closes and the answer is lost":  {after: func(f *faultRun) error { f.h.api.closeWatchesLocked(); return errReset }},
	"watch event before the answer":        {after: func(f *faultRun) error { f.awaitEcho(); return nil }},
	"watch event instead of the answer":    {after: func(f *faultRun) error { f.awaitEcho(); return errReset }},
	"watch falls behind":                   {before: func(f *faultRun) error { f.h.api.holding = true; return nil }},
	"watch falls behind, answer is lost":   {after: func(f *faultRun) error { f.h.api.holding = true; return errReset }},
}

// faultRun is the way of one pod with some claims, with disturbances at given requests.
type faultRun struct {
	h      *harness
	pod    *v1.Pod
	claims []string
	cancel context.CancelFunc

	requests int // since watched
	at       map[int]disturbance
	hit      *disturbance
}

// manyDevices is a node with as many devices as a run has claims, at most.
func manyDevices() world {
	return world{
		nodes:   []*v1.Node{node("node-a")},
		objects: []runtime.Object{class(testClass), slice("node-a", device("gpu-0"), device("gpu-1"), device("gpu-2"))},
	}
}

func newFaultHarness(t *testing.T) *harness {
	h := newHarness(t, manyDevices())
	h.plugin.binder.UndoPauses = wait.Backoff{Duration: time.Microsecond, Steps: 1}
	return h
}

var runs int

// newFaultRun makes claims and a pod with names of their own.
func newFaultRun(h *harness, claims int, at map[int]disturbance) *faultRun {
	runs++
	f := &faultRun{h: h, at: at, cancel: func() {}}
	for i := range claims {
		name := fmt.Sprintf("claim-%d-%d", runs, i)
		f.claims = append(f.claims, name)
		h.api.create(claim(name))
		h.caughtUp(name)
	}
	f.pod = pod(fmt.Sprintf("pod-%d", runs), f.claims...)
	h.api.onRequest(func(request string) error {
		if request == "list/" {
			return nil
		}
		d, ok := f.at[f.requests]
		f.requests++
		f.hit = nil
		if !ok {
			return nil
		}
		f.hit = &d
		if d.before == nil {
			return nil
		}
		return d.before(f)
	})
	h.api.afterWrite(func(string) error {
		if f.hit == nil || f.hit.after == nil {
			return nil
		}
		return f.hit.after(f)
	})
	return f
}

func (f *faultRun) label() {
	for _, name := range f.claims {
		f.h.api.changeLocked(name, func(c *resourceapi.ResourceClaim) {
			c.Labels = map[string]string{"changed": fmt.Sprint(f.h.api.version)}
		})
	}
}

// awaitEcho waits until the tracker has seen everything.
func (f *faultRun) awaitEcho() {
	for _, name := range f.claims {
		stored := f.h.api.claims[types.NamespacedName{Namespace: testNamespace, Name: name}]
		f.h.eventually("the watch has brought claim "+name, func() bool {
			known, err := f.h.plugin.shared.account.Tracker.Get(testNamespace, name)
			return err == nil && known.ResourceVersion == stored.ResourceVersion
		})
	}
}

// settle lets everything arrive that is still on its way.
func (f *faultRun) settle() {
	f.h.api.land()
	f.h.api.release()
	for _, name := range f.claims {
		f.h.caughtUp(name)
	}
}

// attempt schedules the pod once, and undoes it on an error, or in any case.
func (f *faultRun) attempt(giveUp bool) (bound bool) {
	f.h.t.Helper()
	ctx, cancel := context.WithCancel(f.h.ctx)
	defer cancel()
	f.cancel = cancel
	a := f.h.filterAll(f.pod).reserve("node-a")
	status := f.h.plugin.PreBind(ctx, a.state, f.pod, "node-a")
	if status.IsSuccess() && !giveUp {
		return true
	}
	f.h.plugin.Unreserve(ctx, a.state, f.pod, "node-a")
	return false
}

// end removes the claims. Nothing may be left of them.
func (f *faultRun) end() {
	f.h.api.onRequest(nil)
	f.h.api.afterWrite(nil)
	for _, name := range f.claims {
		f.h.api.delete(name)
	}
	f.settle()
	f.h.api.written()
}

// problems says what of the state is not as it is to be: all claims for the pod, or nothing.
func (f *faultRun) problems(bound bool) (found []string) {
	devices := map[string]string{}
	for _, name := range f.claims {
		c := f.h.api.get(name)
		if pending, _ := f.h.plugin.shared.account.Tracker.Pending(c.UID); pending != nil {
			found = append(found, name+" is in flight")
		}
		wantUsers := []string{}
		if bound {
			wantUsers = []string{f.pod.Name}
		}
		if bound != (c.Status.Allocation != nil) || !slices.Equal(usersOf(c), wantUsers) {
			found = append(found, fmt.Sprintf("%s: devices %v, users %v", name, devicesOf(c), usersOf(c)))
		}
		if bound && !slices.Contains(c.Finalizers, resourceapi.Finalizer) {
			found = append(found, name+" has no finalizer")
		}
		for _, device := range devicesOf(c) {
			if other := devices[device]; other != "" {
				found = append(found, fmt.Sprintf("%s and %s have %s", other, name, device))
			}
			devices[device] = name
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(devices)), f.h.heldOn("node-a")); diff != "" {
		found = append(found, "held devices differ from the API (-API +held): "+diff)
	}
	return found
}

// requestsOf counts the requests of an undisturbed run.
func requestsOf(h *harness, claims int, giveUp bool) int {
	f := newFaultRun(h, claims, nil)
	f.attempt(giveUp)
	defer f.end()
	return f.requests
}

// Whatever goes wrong with a request of PreBind or Unreserve: the pod gets its devices when it is tried again, as if
// nothing had happened, and after giving up nothing is left of it.
func TestEveryRequestMayFail(t *testing.T) {
	h := newFaultHarness(t)
	tried := 0
	for claims := 1; claims <= 3; claims++ {
		for _, giveUp := range []bool{false, true} {
			for at := range requestsOf(h, claims, giveUp) {
				for name, d := range passing {
					f := newFaultRun(h, claims, map[int]disturbance{at: d})
					f.check(giveUp, fmt.Sprintf("%d claims, request %d: %s", claims, at, name))
					tried++
				}
			}
		}
	}
	t.Logf("%d steps tried", tried)
	if tried < 600 {
		t.Error("too few: the test proves nothing")
	}
}

// hidden are the disturbances that leave most to find out.
var hidden = []string{
	"500, took effect", "timeout", "timeout, takes effect later", "conflict of the second try with ours",
	"labelled, and the answer is lost", "context ends, took effect", "watch falls behind, answer is lost",
}

// The same with two things going wrong, so that also what an error leads to is disturbed.
func TestEveryTwoRequestsMayFail(t *testing.T) {
	h := newFaultHarness(t)
	tried := 0
	for _, giveUp := range []bool{false, true} {
		requests := requestsOf(h, 1, giveUp)
		for first := range requests {
			// The first one leads to requests of Unreserve that are not in an undisturbed run.
			for second := first + 1; second < requests+2; second++ {
				for _, a := range hidden {
					for _, b := range hidden {
						f := newFaultRun(h, 1, map[int]disturbance{first: passing[a], second: passing[b]})
						f.check(giveUp, fmt.Sprintf("request %d: %s, request %d: %s", first, a, second, b))
						tried++
					}
				}
			}
		}
	}
	t.Logf("%d steps tried", tried)
	if tried < 500 {
		t.Error("too few: the test proves nothing")
	}
}

// check runs attempts until the pod is bound, or one if it is given up.
func (f *faultRun) check(giveUp bool, what string) {
	f.h.t.Helper()
	defer f.end()
	bound := false
	for attempts := 0; attempts < 4 && !bound; attempts++ {
		bound = f.attempt(giveUp)
		f.settle()
		if !bound {
			if problems := f.problems(false); len(problems) > 0 {
				f.h.t.Fatalf("%s, after undoing:\n%s\nwrites: %v", what, strings.Join(problems, "\n"), f.h.api.written())
			}
		}
		if giveUp {
			return
		}
	}
	if problems := f.problems(true); len(problems) > 0 {
		f.h.t.Fatalf("%s, in the end:\n%s\nwrites: %v", what, strings.Join(problems, "\n"), f.h.api.written())
	}
}
