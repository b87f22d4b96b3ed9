// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// TestStatsShowHowFullTheCachesOfPoolsAre asks for more parts of one pool, and more attributes of one part, than are kept.
func TestStatsShowHowFullTheCachesOfPoolsAre(t *testing.T) {
	const bits = 13
	store := newStore()
	for i := range bits {
		store.SetSlice(slice(fmt.Sprint("s", i), "", pool("racks", 1, bits), devices(fmt.Sprint("d", i)), func(s *resourceapi.ResourceSlice) {
			s.Spec.NodeName = nil
			s.Spec.NodeSelector = &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{{
				Key: fmt.Sprint("bit", i), Operator: v1.NodeSelectorOpExists,
			}}}}}
		}))
	}
	store.SetSlice(slice("other", "n1", pool("other", 1, 1), devices("d0")))
	view := store.View()
	// sees is a node that sees the slices whose bits are set in the number.
	sees := func(number int) *v1.Node {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{}}}
		for i := range bits {
			if number&(1<<i) != 0 {
				n.Labels[fmt.Sprint("bit", i)] = ""
			}
		}
		return n
	}
	for number := range 100 {
		view.ForNode(sees(number + 1))
	}
	racks := view.ForNode(sees(1)).Pools[0]
	for i := range maxColumns {
		racks.Attribute(resourceapi.FullyQualifiedName(fmt.Sprint("a/", i)))
	}
	view.NumberOf("ns", "text")
	stats := func() Stats {
		s := store.Stats()
		s.Selectors, s.Matchers, s.Derivations = CacheStats{}, CacheStats{}, CacheStats{} // see TestCachesAreBoundedAndStayRight
		return s
	}
	want := Stats{
		Numbers: CacheStats{Entries: 1, Limit: MaxNumbers},
		Parts:   CacheStats{Entries: 100, Limit: maxParts},
		Columns: CacheStats{Entries: maxColumns, Limit: maxColumns},
	}
	if diff := cmp.Diff(want, stats()); diff != "" {
		t.Errorf("with room left (-want +got):\n%s", diff)
	}

	for number := range maxParts + 5 {
		view.ForNode(sees(number + 1))
	}
	racks.Attribute("a/more")
	for i := range MaxNumbers + 2 {
		view.NumberOf("ns", fmt.Sprint("text", i))
	}
	want = Stats{
		Numbers: CacheStats{Entries: MaxNumbers, Limit: MaxNumbers, Evicted: 3},
		Parts:   CacheStats{Entries: maxParts, Limit: maxParts, Evicted: 5},
		Columns: CacheStats{Entries: 1, Limit: maxColumns, Evicted: maxColumns},
	}
	if diff := cmp.Diff(want, stats()); diff != "" {
		t.Errorf("with none left (-want +got):\n%s", diff)
	}
}

// A device is found by its name in pools of any size, whether names are looked through or kept.
func TestDevicesAreFoundByName(t *testing.T) {
	for _, n := range []int{0, 1, maxScan, maxScan + 1, 3 * maxScan} {
		p := &NodePool{}
		for i := range n {
			p.devices = append(p.devices, &resourceapi.Device{Name: fmt.Sprintf("gpu-%d", i)})
		}
		for i := range n {
			if got := p.Index(fmt.Sprintf("gpu-%d", i)); got != i {
				t.Errorf("of %d devices gpu-%d is the one at %d", n, i, got)
			}
		}
		if got := p.Index(fmt.Sprintf("gpu-%d", n)); got != -1 {
			t.Errorf("of %d devices one that is not among them is the one at %d", n, got)
		}
		if kept := p.names != nil; kept != (n > maxScan) {
			t.Errorf("of %d devices the names are kept: %t", n, kept)
		}
	}
}

// Of more kinds of pools than are recognized at a time the one that was seen longest ago is forgotten. A pool of it has counters of its
// own, which are the same.
func TestMoreKindsOfPoolsThanAreRecognized(t *testing.T) {
	kind := func(n int) *Counters {
		return &Counters{All: []Counter{{Set: "gpu", Name: "memory", Total: amount.Of(*resource.NewQuantity(int64(n), resource.BinarySI))}}}
	}
	tables := &counterTables{}
	first, second := kind(0), kind(1)
	tables.shared(first)
	tables.shared(second)
	for n := 2; n < maxTables; n++ {
		tables.shared(kind(n))
	}
	if got := tables.shared(kind(0)); got != first {
		t.Error("a kind of pools that was seen before is not recognized")
	}
	tables.shared(kind(maxTables))
	if len(tables.recent) != maxTables {
		t.Errorf("%d kinds are kept, want %d", len(tables.recent), maxTables)
	}
	if got := tables.shared(kind(0)); got != first {
		t.Error("the kind that was seen last is forgotten")
	}
	if got := tables.shared(kind(1)); got == second || !got.equal(second) {
		t.Errorf("counters of a kind that was forgotten: %v, want others like %v", got, second)
	}
}
