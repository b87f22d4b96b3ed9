// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Of thousands that wait, each device that is freed wakes one: the one that has waited longest.
func TestOneOfThousandsIsWokenForOneDevice(t *testing.T) {
	const waiting = 2000
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{
		claim("on-a", allocated("node-a", "gpu-0")), claim("on-b-0", allocated("node-b", "gpu-0")), claim("on-b-1", allocated("node-b", "gpu-1")),
	}
	for i := range waiting {
		name := fmt.Sprintf("p-%04d", i)
		p := pod(name, name)
		// The first in the list is the youngest.
		p.CreationTimestamp = metav1.NewTime(time.Unix(int64(waiting-i), 0))
		w.pods, w.claims = append(w.pods, p), append(w.claims, claim(name))
	}
	h := newHarness(t, w)
	h.plugin.refusals.HoldersLimit = time.Nanosecond // whom it would help to release is not asked here
	byName := map[string]*v1.Pod{}
	for _, p := range w.pods {
		byName[p.Name] = p
		h.sleeps(p)
	}
	for i, freed := range []string{"on-a", "on-b-1"} {
		h.api.change(freed, func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
		h.eventually("the device is free", func() bool { return len(h.has(freed)) == 0 })
		oldest := fmt.Sprintf("p-%04d", waiting-1-i)
		var woken []string // the tracker shows what is free before it tells of that
		h.eventually("somebody is woken", func() bool { woken = append(woken, h.lookedAt()...); return len(woken) > 0 })
		if diff := cmp.Diff([]string{oldest}, woken); diff != "" {
			t.Fatalf("woken when %s is released (-want +got):\n%s", freed, diff)
		}
		node := map[string]string{"on-a": "node-a", "on-b-1": "node-b"}[freed]
		h.filterAll(byName[oldest]).reserve(node)
		if woken := h.lookedAt(); len(woken) > 0 {
			t.Errorf("woken when the device is taken: %v", woken)
		}
	}
}
