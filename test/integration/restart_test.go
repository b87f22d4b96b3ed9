// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var errCut = errors.New("read tcp: connection reset by peer")

// awaitAllReleased waits until no claim of the world is allocated or reserved.
func (w *world) awaitAllReleased() {
	w.t.Helper()
	list, err := w.client.ResourceV1().ResourceClaims(w.name).List(w.ctx, metav1.ListOptions{})
	w.must(err, "listing claims")
	for i := range list.Items {
		w.awaitClaim(list.Items[i].Name, "released", func(c *resourceapi.ResourceClaim) bool {
			return c.Status.Allocation == nil && len(c.Status.ReservedFor) == 0
		})
	}
}

// deadWire is the connection of a scheduler that is killed: at the nth write of a claim or binding, before or after it has
// reached the API server, and from then on, nothing comes through.
type deadWire struct {
	world *world
	at    int
	after bool

	mutex  sync.Mutex
	writes int
	isDead bool
	dead   chan struct{}
}

func (d *deadWire) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		d.mutex.Lock()
		if d.isDead {
			d.mutex.Unlock()
			return nil, errCut
		}
		die := false
		if writesClaim(r, d.world.name) || r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/binding") && strings.Contains(r.URL.Path, "/"+d.world.name+"/") {
			die = d.writes == d.at
			d.writes++
		}
		d.isDead = die
		d.mutex.Unlock()
		if !die {
			return next.RoundTrip(r)
		}
		defer close(d.dead)
		if d.after {
			if got, err := next.RoundTrip(r); err == nil {
				_ = got.Body.Close()
			}
		}
		return nil, errCut
	})
}

// A scheduler is killed at each write for a pod with two claims. The next one gives the pod its devices, from the API
// alone; and if the pod is deleted meanwhile, nothing of it is left, though nobody but kube-controller-manager is there
// to clean up.
func TestSchedulerIsKilledAtEveryWrite(t *testing.T) {
	t.Parallel()
	const writes = 5 // two finalizers, two allocations, the binding
	for at := range writes {
		for _, after := range []bool{false, true} {
			for _, deleted := range []bool{false, true} {
				t.Run(fmt.Sprintf("write %d, after it %t, pod deleted %t", at, after, deleted), func(t *testing.T) {
					t.Parallel()
					w := newWorld(t)
					w.addNode("a", gpus(h100, 2)...)
					w.addClaim("one", spec(w.exactly("gpu", 1)))
					w.addClaim("two", spec(w.exactly("gpu", 1)))
					wire := &deadWire{world: w, at: at, after: after, dead: make(chan struct{})}
					startScheduler(t, w.name, schedulerSetup{wrap: wire.wrap})
					w.addPod("pod", withClaim("one"), withClaim("two"))
					select {
					case <-wire.dead:
					case <-time.After(patience):
						t.Fatalf("write %d does not come", at)
					}
					if deleted {
						w.deletePod("pod")
						w.awaitAllReleased()
						return
					}
					startScheduler(t, w.name, schedulerSetup{})
					pod := w.awaitBound("pod")
					found := map[string]bool{}
					for _, name := range []string{"one", "two"} {
						claim := w.claim(name)
						if got := devices(claim); len(got) != 1 || found[got[0]] || len(claim.Status.ReservedFor) != 1 || claim.Status.ReservedFor[0].UID != pod.UID {
							t.Errorf("after the restart: %s", describe(claim))
						} else {
							found[got[0]] = true
						}
					}
				})
			}
		}
	}
}
