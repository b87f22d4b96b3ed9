package deviceclaims

import (
	"strings"
	"testing"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"

	"stowage.dev/stowage/pkg/inventory"
)

func TestCacheMetricsShowHowFullTheCachesAre(t *testing.T) {
	c := &cacheCollector{}
	registry := metrics.NewKubeRegistry()
	registry.CustomMustRegister(c)
	if err := testutil.GatherAndCompare(registry, strings.NewReader("")); err != nil {
		t.Errorf("before there is an inventory: %v", err)
	}

	store := inventory.NewStore(inventory.Options{MaxSelectors: 2, MaxMatchers: 3})
	c.store.Store(store)
	for _, selector := range []string{"true", "false", "!true"} {
		if _, err := store.View().Matcher(inventory.MatcherSpec{Selectors: []string{selector}}); err != nil {
			t.Fatal(err)
		}
	}
	want := `
		# HELP stowage_scheduler_cache_entries [ALPHA] Number of entries in a bounded cache: compiled CEL selectors, or matchers (the selectors and tolerations of a request).
		# TYPE stowage_scheduler_cache_entries gauge
		stowage_scheduler_cache_entries{cache="matchers"} 3
		stowage_scheduler_cache_entries{cache="selectors"} 2
		# HELP stowage_scheduler_cache_evictions_total [ALPHA] Number of entries that had to leave a bounded cache to make room for others.
		# TYPE stowage_scheduler_cache_evictions_total counter
		stowage_scheduler_cache_evictions_total{cache="matchers"} 0
		stowage_scheduler_cache_evictions_total{cache="selectors"} 1
		# HELP stowage_scheduler_cache_limit [ALPHA] Largest number of entries of a bounded cache.
		# TYPE stowage_scheduler_cache_limit gauge
		stowage_scheduler_cache_limit{cache="matchers"} 3
		stowage_scheduler_cache_limit{cache="selectors"} 2
	`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}
