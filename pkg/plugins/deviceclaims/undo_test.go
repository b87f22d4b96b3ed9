// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
)

// reservedAgain takes the pod's reservation away and gives it again, as a scheduler that undoes and one that binds.
func reservedAgain(h *harness) {
	var before []resourceapi.ResourceClaimConsumerReference
	h.api.change("c", func(c *resourceapi.ResourceClaim) { before, c.Status.ReservedFor = c.Status.ReservedFor, nil })
	h.api.change("c", func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = before })
}

// What Unreserve leaves alone, and what it takes back, where others handle the same claim or the same pod.
func TestUndoTouchesOnlyWhatIsOurs(t *testing.T) {
	lost := func(h *harness) {
		h.api.afterWrite(func(request string) error {
			if request == "update/status" {
				return errReset
			}
			return nil
		})
	}
	tests := map[string]struct {
		claim *resourceapi.ResourceClaim
		// api is the pod as the API has it, nil if it is gone.
		api *v1.Pod
		// before comes before PreBind, and after between PreBind and Unreserve.
		before, after func(h *harness)
		wantDevices   []string
		wantUsers     []string
		wantFinalizer bool
	}{
		"what we wrote is taken back": {
			claim: claim("c"), api: pod("p", "c"), wantUsers: []string{}, wantFinalizer: true,
		},
		"what we wrote is taken back although the answer was lost": {
			claim: claim("c"), before: lost, wantUsers: []string{}, wantFinalizer: true,
		},
		"another scheduler was faster with the same devices and the same pod": {
			claim: claim("c"),
			before: func(h *harness) {
				h.api.hold()
				h.api.change("c", allocated("node-a", "gpu-0"))
				h.api.change("c", reservedFor("p"))
			},
			wantDevices: []string{"gpu-0"}, wantUsers: []string{"p"}, wantFinalizer: true,
		},
		"another scheduler wrote the same when our answer was lost on the way there": {
			claim: claim("c"),
			before: func(h *harness) {
				h.api.onRequest(func(request string) error {
					if request == "update/status" {
						return errTimeout
					}
					return nil
				})
			},
			after: func(h *harness) {
				h.api.onRequest(nil)
				h.api.change("c", allocated("node-a", "gpu-0"))
				h.api.change("c", reservedFor("p"))
			},
			wantDevices: []string{"gpu-0"}, wantUsers: []string{"p"}, wantFinalizer: true,
		},
		"another scheduler allocated the same for nobody when our answer was lost on the way there": {
			claim: claim("c"),
			before: func(h *harness) {
				h.api.onRequest(func(request string) error {
					if request == "update/status" {
						return errTimeout
					}
					return nil
				})
			},
			after: func(h *harness) {
				h.api.onRequest(nil)
				h.api.change("c", allocated("node-a", "gpu-0"))
			},
			wantDevices: []string{"gpu-0"}, wantUsers: []string{}, wantFinalizer: true,
		},
		"another scheduler has reserved our allocation again for the same pod": {
			claim: claim("c"), after: reservedAgain,
			wantDevices: []string{"gpu-0"}, wantUsers: []string{"p"}, wantFinalizer: true,
		},
		"the same after a lost answer": {
			claim: claim("c"), before: lost, after: reservedAgain,
			wantDevices: []string{"gpu-0"}, wantUsers: []string{"p"}, wantFinalizer: true,
		},
		"our reservation is gone, our allocation goes": {
			claim:     claim("c"),
			after:     func(h *harness) { h.api.change("c", func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil }) },
			wantUsers: []string{}, wantFinalizer: true,
		},
		"another pod uses our allocation": {
			claim: claim("c"), before: lost, after: func(h *harness) { h.api.change("c", reservedFor("other")) },
			wantDevices: []string{"gpu-0"}, wantUsers: []string{"other"}, wantFinalizer: true,
		},
		"the last user takes the allocation along": {
			claim: claim("c", allocated("node-a", "gpu-0"), reservedFor("other")),
			after: func(h *harness) {
				h.api.change("c", func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = c.Status.ReservedFor[1:] })
			},
			wantUsers: []string{}, wantFinalizer: true,
		},
		"an allocation that stood unused stays": {
			claim: claim("c", allocated("node-a", "gpu-0")), before: lost,
			wantDevices: []string{"gpu-0"}, wantUsers: []string{}, wantFinalizer: true,
		},
		"a bound pod keeps everything": {
			claim: claim("c"), api: boundPod(pod("p", "c"), "p-uid"),
			wantDevices: []string{"gpu-0"}, wantUsers: []string{"p"}, wantFinalizer: true,
		},
		"a bound pod keeps everything although the answer was lost": {
			claim: claim("c"), api: boundPod(pod("p", "c"), "p-uid"), before: lost,
			wantDevices: []string{"gpu-0"}, wantUsers: []string{"p"}, wantFinalizer: true,
		},
		"a bound pod of the same name is another one": {
			claim: claim("c"), api: boundPod(pod("p", "c"), "p2-uid"), wantUsers: []string{}, wantFinalizer: true,
		},
		"who wrote it is not to be told": {
			claim: claim("c"), before: lost,
			after: func(h *harness) {
				h.api.change("c", func(c *resourceapi.ResourceClaim) { h.api.owners[c.UID] = statusOwners{} })
			},
			wantDevices: []string{"gpu-0"}, wantUsers: []string{"p"}, wantFinalizer: true,
		},
		"a write that is still on its way is barred": {
			claim: claim("c"),
			before: func(h *harness) {
				h.api.onRequest(func(request string) error {
					if request == "update/status" {
						return errLate
					}
					return nil
				})
			},
			after:     func(h *harness) { h.api.onRequest(nil) },
			wantUsers: []string{},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{tc.claim}
			if tc.api != nil {
				w.pods = []*v1.Pod{tc.api}
			}
			h := newHarness(t, w)
			a := h.filterAll(pod("p", "c")).reserve("node-a")
			if tc.before != nil {
				tc.before(h)
			}
			a.preBind("node-a")
			h.api.afterWrite(nil)
			if tc.after != nil {
				tc.after(h)
			}
			a.unreserve("node-a")
			h.api.land()
			h.api.release()
			h.caughtUp("c")
			got := h.api.get("c")
			if diff := cmp.Diff(tc.wantDevices, devicesOf(got)); diff != "" {
				t.Errorf("devices differ (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.wantUsers, usersOf(got)); diff != "" {
				t.Errorf("users differ (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.wantDevices, h.heldOn("node-a")); diff != "" {
				t.Errorf("held devices differ (-want +got):\n%s", diff)
			}
			if has := slices.Contains(got.Finalizers, resourceapi.Finalizer); has != tc.wantFinalizer {
				t.Errorf("finalizer there: %t, want %t", has, tc.wantFinalizer)
			}
		})
	}
}

func boundPod(p *v1.Pod, uid types.UID) *v1.Pod {
	p.UID, p.Spec.NodeName = uid, "node-a"
	return p
}

// Changes of a claim that forbid to go on, at each request of PreBind, before it and after it with the answer lost:
// the pod is not bound, and nothing of ours is left in any claim.
func TestClaimChangesAtEveryRequest(t *testing.T) {
	h := newFaultHarness(t)
	changes := map[string]func(f *faultRun, name string){
		"deleted": func(f *faultRun, name string) { f.h.api.deleteLocked(name) },
		"deleted and created again": func(f *faultRun, name string) {
			f.h.api.deleteLocked(name)
			again := claim(name)
			again.UID += "-2"
			f.h.api.store(again, watch.Added, "kubectl")
		},
		"being deleted": func(f *faultRun, name string) { f.h.api.changeLocked(name, deleting) },
		"full": func(f *faultRun, name string) {
			f.h.api.changeLocked(name, func(c *resourceapi.ResourceClaim) {
				allocated("node-a", "gpu-0")(c)
				for i := range resourceapi.ResourceClaimReservedForMaxSize {
					reservedFor("other-" + string(rune('a'+i)))(c)
				}
			})
		},
		"allocated elsewhere": func(f *faultRun, name string) {
			f.h.api.changeLocked(name, allocated("node-b", "gpu-7"))
			f.h.api.changeLocked(name, func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil })
			f.h.api.changeLocked(name, reservedFor("other"))
		},
	}
	tried := 0
	for claims := 1; claims <= 3; claims++ {
		for at := range requestsOf(h, claims, false) {
			for kind, change := range changes {
				for which := range claims {
					for when, d := range map[string]disturbance{
						"before":                    {before: func(f *faultRun) error { change(f, f.claims[which]); return nil }},
						"after, the answer is lost": {after: func(f *faultRun) error { change(f, f.claims[which]); return errReset }},
					} {
						tried++
						f := newFaultRun(h, claims, map[int]disturbance{at: d})
						f.attempt(true)
						f.settle()
						for i, name := range f.claims {
							c := f.h.api.get(name)
							if c == nil {
								continue
							}
							users := usersOf(c)
							if slices.Contains(users, f.pod.Name) || len(users) == 0 && c.Status.Allocation != nil {
								t.Fatalf("%d claims, claim %d is %s %s request %d: claim %d has devices %v, users %v", claims, which, kind, when, at, i, devicesOf(c), users)
							}
							if pending, _ := h.plugin.shared.account.Tracker.Pending(c.UID); pending != nil {
								t.Fatalf("%d claims, claim %d is %s %s request %d: claim %d is in flight", claims, which, kind, when, at, i)
							}
						}
						f.end()
						if held := h.heldOn("node-a"); len(held) > 0 {
							t.Fatalf("%d claims, claim %d is %s %s request %d: still held: %v", claims, which, kind, when, at, held)
						}
					}
				}
			}
		}
	}
	t.Logf("%d steps tried", tried)
}

// The scheduler ends while it cannot find out what has become of a write: Unreserve returns, and the device stays
// held until then.
func TestUnreserveEndsWithTheScheduler(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("c")}
	h := newHarness(t, w)
	a := h.filterAll(pod("p", "c")).reserve("node-a")
	h.api.hold()
	h.api.afterWrite(func(request string) error {
		if request == "update/status" {
			return errReset
		}
		return nil
	})
	ctx, cancel := context.WithCancel(h.ctx)
	defer cancel()
	if status := h.plugin.PreBind(ctx, a.state, a.pod, "node-a"); status.IsSuccess() {
		t.Fatal("PreBind succeeded")
	}
	asked := make(chan struct{}, 100)
	h.api.onRequest(func(request string) error {
		if request == "get/" {
			select {
			case asked <- struct{}{}:
			default:
			}
			return errServer
		}
		return nil
	})
	done := make(chan struct{})
	go func() { defer close(done); h.plugin.Unreserve(ctx, a.state, a.pod, "node-a") }()
	<-asked
	<-asked
	if diff := cmp.Diff([]string{"gpu-0"}, h.heldOn("node-a")); diff != "" {
		t.Errorf("held devices differ (-want +got):\n%s", diff)
	}
	cancel() // the cycle's end is no reason to stop
	<-asked
	h.cancel()
	<-done
}

func TestRefusals(t *testing.T) {
	for name, tc := range map[string]struct {
		err  error
		want bool
	}{
		"no answer":         {err: errReset},
		"500":               {err: errServer},
		"504":               {err: errGateway},
		"408":               {err: apierrors.NewTimeoutError("slow", 1)},
		"429":               {err: errBusy},
		"409":               {err: errFormer},
		"403":               {err: errDenied, want: true},
		"404":               {err: apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), "c"), want: true},
		"422":               {err: apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), "c", nil), want: true},
		"the context ended": {err: context.Canceled},
	} {
		if got := binding.IsRefusal(tc.err); got != tc.want {
			t.Errorf("%s: isRefusal is %t, want %t", name, got, tc.want)
		}
	}
}

// The binding of a pod that PreBind has let go may take effect although no answer came, and late.
func TestUnreserveWaitsForABindingThatIsUnderWay(t *testing.T) {
	bind := func(h *harness) {
		_, err := h.client.CoreV1().Pods(testNamespace).Update(h.ctx, boundPod(pod("p", "c"), "p-uid"), metav1.UpdateOptions{})
		if err != nil {
			h.t.Error(err)
		}
	}
	tests := map[string]struct {
		api *v1.Pod
		// fails says that PreBind does, so that the pod was not sent.
		fails bool
		// meanwhile happens in the time of grace; nil if there is to be none.
		meanwhile func(h *harness)
		want      []string
	}{
		"it comes":        {api: pod("p", "c"), meanwhile: bind, want: []string{"gpu-0"}},
		"it does not":     {api: pod("p", "c"), meanwhile: func(*harness) {}},
		"has come":        {api: boundPod(pod("p", "c"), "p-uid"), want: []string{"gpu-0"}},
		"was never sent":  {api: pod("p", "c"), fails: true},
		"the pod is gone": {},
		"the pod is new":  {api: func() *v1.Pod { p := pod("p", "c"); p.UID = "again"; return p }()},
		"the pod is ending": {api: func() *v1.Pod {
			p := pod("p", "c")
			p.DeletionTimestamp = &metav1.Time{Time: time.Now()}
			p.Finalizers = []string{"example.com/kept"}
			return p
		}()},
		"the scheduler ends first": {
			api: pod("p", "c"), meanwhile: func(h *harness) { h.cancel() }, want: []string{"gpu-0"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{claim("c")}
			if tc.api != nil {
				w.pods = []*v1.Pod{tc.api}
			}
			h := newHarness(t, w)
			clock := testingclock.NewFakeClock(time.Now())
			h.plugin.binder.Clock, h.plugin.binder.Grace = clock, binding.Grace
			a := h.filterAll(pod("p", "c")).reserve("node-a")
			if tc.fails {
				h.api.afterWrite(func(request string) error {
					if request == "update/status" {
						return errReset
					}
					return nil
				})
			}
			if status := a.preBind("node-a"); status.IsSuccess() == tc.fails {
				t.Fatalf("PreBind: %v", status)
			}
			h.api.afterWrite(nil)
			done := make(chan struct{})
			go func() { defer close(done); a.unreserve("node-a") }()
			if tc.meanwhile != nil {
				h.eventually("Unreserve waits", clock.HasWaiters)
				if diff := cmp.Diff([]string{"gpu-0"}, devicesOf(h.api.get("c"))); diff != "" {
					t.Errorf("devices differ while it waits (-want +got):\n%s", diff)
				}
				tc.meanwhile(h)
				if h.ctx.Err() == nil {
					clock.Step(binding.Grace)
				}
			}
			<-done
			if diff := cmp.Diff(tc.want, devicesOf(h.api.get("c"))); diff != "" {
				t.Errorf("devices differ (-want +got):\n%s", diff)
			}
		})
	}
}
