// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package account

import (
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
)

func TestCacheMetricsShowHowFullTheCachesAre(t *testing.T) {
	c := &cacheCollector{}
	registry := metrics.NewKubeRegistry()
	registry.CustomMustRegister(c)
	if err := testutil.GatherAndCompare(registry, strings.NewReader("")); err != nil {
		t.Errorf("before there is an inventory: %v", err)
	}

	store := inventory.NewStore(inventory.Options{Features: inventory.Features{DerivedAttributes: true}, MaxSelectors: 2, MaxMatchers: 3, MaxDerivations: 4})
	store.SetSlice(&resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "slice"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.example.com", NodeName: ptr.To("node"), Pool: resourceapi.ResourcePool{Name: "node", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-0"}},
		},
	})
	store.SetSlice(&resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "of-another-node"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.example.com", NodeName: ptr.To("other"), Pool: resourceapi.ResourcePool{Name: "node", Generation: 2, ResourceSliceCount: 1},
		},
	})
	c.store.Store(store)
	view := store.View()
	displaced := allocator.GlanceStats(view).Evicted
	for _, selector := range []string{"true", "false", "!true"} {
		if _, err := view.Matcher(t.Context(), inventory.MatcherSpec{Selectors: []string{selector}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := view.Derivation(t.Context(), "ns", `"a"`); err != nil {
		t.Fatal(err)
	}
	for i := range inventory.MaxNumbers + 5 { // besides that of the requests below
		view.NumberOf("ns", strconv.Itoa(i))
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
	view.ForNode(node).Pools[0].Attribute("a/b")
	requests, err := allocator.Compile(nil, view, allocator.DefaultFeatures())
	if err != nil {
		t.Fatal(err)
	}
	allocator.Check(t.Context(), allocator.Input{Requests: requests, Node: node, Inventory: view})

	want := `
		# HELP stowage_scheduler_cache_entries [ALPHA] Number of entries in a bounded cache: compiled CEL selectors, matchers (the selectors and tolerations of a request), derivations (compiled CEL expressions of derived attributes), numbers (kinds of requests), glances (nodes), or, in the pool that has most, parts (what different nodes see of it) and columns (attributes of its devices).
		# TYPE stowage_scheduler_cache_entries gauge
		stowage_scheduler_cache_entries{cache="columns"} 1
		stowage_scheduler_cache_entries{cache="derivations"} 1
		stowage_scheduler_cache_entries{cache="glances"} 1
		stowage_scheduler_cache_entries{cache="matchers"} 3
		stowage_scheduler_cache_entries{cache="numbers"} 1024
		stowage_scheduler_cache_entries{cache="parts"} 1
		stowage_scheduler_cache_entries{cache="selectors"} 2
		# HELP stowage_scheduler_cache_evictions_total [ALPHA] Number of entries that had to leave a bounded cache to make room for others, or for which there was none.
		# TYPE stowage_scheduler_cache_evictions_total counter
		stowage_scheduler_cache_evictions_total{cache="columns"} 0
		stowage_scheduler_cache_evictions_total{cache="derivations"} 0
		stowage_scheduler_cache_evictions_total{cache="glances"} EARLIER
		stowage_scheduler_cache_evictions_total{cache="matchers"} 0
		stowage_scheduler_cache_evictions_total{cache="numbers"} 6
		stowage_scheduler_cache_evictions_total{cache="parts"} 0
		stowage_scheduler_cache_evictions_total{cache="selectors"} 1
		# HELP stowage_scheduler_cache_limit [ALPHA] Largest number of entries of a bounded cache.
		# TYPE stowage_scheduler_cache_limit gauge
		stowage_scheduler_cache_limit{cache="columns"} 32
		stowage_scheduler_cache_limit{cache="derivations"} 4
		stowage_scheduler_cache_limit{cache="glances"} 1.048576e+06
		stowage_scheduler_cache_limit{cache="matchers"} 3
		stowage_scheduler_cache_limit{cache="numbers"} 1024
		stowage_scheduler_cache_limit{cache="parts"} 4096
		stowage_scheduler_cache_limit{cache="selectors"} 2
		# HELP stowage_scheduler_pool_problems [ALPHA] Number of pools of ResourceSlices whose devices cannot be used: incomplete while its driver publishes it, or invalid. A node whose slices contradict another node's pool counts as an invalid one.
		# TYPE stowage_scheduler_pool_problems gauge
		stowage_scheduler_pool_problems{problem="incomplete"} 0
		stowage_scheduler_pool_problems{problem="invalid"} 1
	`
	// Those of the whole process are counted, so those of the tests before, too. None is of this one: it has one node.
	want = strings.Replace(want, "EARLIER", strconv.FormatUint(displaced, 10), 1)
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}
