// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// Plugins and changes have the very objects of a snapshot, which more than one simulation may read: none of these is changed, whatever is
// tried.
func TestASimulationChangesNoObject(t *testing.T) {
	c := snapshottest.New(3, 4)
	c.Run("a", "low-one", 0, 0, 0, 1, 2, 3)
	c.Run("a", "low-two", 0, 1, 0, 1)
	c.Run("b", "high", 1000, 2, 0, 1, 2)
	c.Taint(1, 3, "gpu.nvidia.com/xid")
	c.Pod("b", "evicts", 4, 1000)
	c.Pod("b", "waits", 3, 0)
	c.Pod("b", "one", 1, 0)
	var before []runtime.Object
	for object := range c.All() {
		before = append(before, object.DeepCopyObject())
	}
	same := func(after string) {
		t.Helper()
		i := 0
		for object := range c.All() {
			if diff := cmp.Diff(before[i], object); diff != "" {
				t.Errorf("%s: %T has changed: %s", after, object, diff)
			}
			i++
		}
		if i != len(before) {
			t.Errorf("%s: %d objects, want %d", after, i, len(before))
		}
	}
	for _, name := range []string{"evicts", "waits", "one"} {
		if _, err := simulate.Explain(t.Context(), &c.Objects, "b", name, simulate.Options{}); err != nil {
			t.Fatal(err)
		}
	}
	same("explained")
	outcomes, err := simulate.Place(t.Context(), simulate.NewChange(&c.Objects), simulate.Waiting(&c.Objects), simulate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(outcomes) != 3 || len(outcomes[0].Victims) == 0 {
		t.Errorf("outcomes %+v, want that the first evicts", outcomes)
	}
	same("placed")
	change := simulate.NewChange(&c.Objects)
	node := c.Nodes[0].Name
	back, err := change.Drain(node)
	if err != nil {
		t.Fatal(err)
	}
	if err := change.AddNodes(c.Nodes[1].Name, 2); err != nil {
		t.Fatal(err)
	}
	if err := change.Delete("b", "high"); err != nil {
		t.Fatal(err)
	}
	waiting := append([]*v1.Pod{}, simulate.Waiting(&change.Objects)...)
	change.SetPriority(waiting, 7)
	if _, err := simulate.Place(t.Context(), change, append(waiting, back...), simulate.Options{}); err != nil {
		t.Fatal(err)
	}
	same("drained, with more nodes, and without a pod")
}
