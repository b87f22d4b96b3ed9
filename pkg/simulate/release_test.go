// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// A release is proposed if the pod then fits, all else counted: CPUs that go with the claim's own pods are free, those of others are not.
func TestAReleaseThatIsNotEnough(t *testing.T) {
	cpus := func(pod *v1.Pod, n string) {
		pod.Spec.Containers[0].Resources.Requests = v1.ResourceList{v1.ResourceCPU: resource.MustParse(n)}
	}
	c := snapshottest.New(3, 1)
	for node, of := range []struct{ holder, neighbour string }{{"1", "185"}, {"185", "1"}, {"100", "85"}} {
		holder, _ := c.Run("a", []string{"holder-0", "holder-1", "holder-2"}[node], 0, node, 0)
		cpus(holder, of.holder)
		neighbour, _ := c.Run("a", []string{"neighbour-0", "neighbour-1", "neighbour-2"}[node], 0, node)
		neighbour.Spec.ResourceClaims, neighbour.Spec.Containers[0].Resources.Claims = nil, nil
		cpus(neighbour, of.neighbour)
	}
	for name, tc := range map[string]struct {
		cpus          string
		release, none []string
	}{
		"a few":  {cpus: "1", release: []string{"worker-0", "worker-1", "worker-2"}},
		"some":   {cpus: "100", release: []string{"worker-1", "worker-2"}, none: []string{"worker-0"}},
		"many":   {cpus: "180", release: []string{"worker-1"}, none: []string{"worker-0", "worker-2"}},
		"nearly": {cpus: "192", none: []string{"worker-0", "worker-1", "worker-2"}},
	} {
		t.Run(name, func(t *testing.T) {
			all := *c
			all.Objects = c.Objects.Clone()
			pod, _ := all.Pod("a", "waits", 1, 0)
			cpus(pod, tc.cpus)
			why, err := simulate.Explain(t.Context(), &all.Objects, "a", "waits", simulate.Options{})
			if err != nil {
				t.Fatal(err)
			}
			var release, none []string
			for _, h := range why.Outcome.Explanation.Holders {
				release = append(release, h.Node)
			}
			for _, besides := range why.Outcome.Besides {
				if besides.Reason != "Insufficient cpu" {
					t.Errorf("%v: %s", besides.Nodes, besides.Reason)
				}
				none = append(none, besides.Nodes...)
			}
			if diff := cmp.Diff([][]string{tc.release, tc.none}, [][]string{release, none}); diff != "" {
				t.Error(diff)
			}
		})
	}
}
