package liveness

import (
	"flag"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr"
)

var everyNth = flag.Int("every", 41, "play every n-th entry of the fault matrix")

// However a write fails, and whenever the scheduler ends: no device is held for nobody, none is held twice, and nobody waits who
// could run.
func TestFaultMatrix(t *testing.T) {
	begin, played, entry := time.Now(), 0, 0
	for _, name := range slices.Sorted(maps.Keys(pairs)) {
		t.Run(name, func(t *testing.T) {
			h, differences := run(t, pairs[name], logr.Discard())
			if len(differences) > 0 {
				t.Fatalf("without a fault: %q", differences)
			}
			t.Logf("writes: %v", h.requests)
			for _, scenario := range matrix(pairs[name], h.requests) {
				if entry++; entry%*everyNth != 0 {
					continue
				}
				played++
				if differences := Run(t, scenario, logr.Discard()); len(differences) > 0 {
					t.Errorf("%q\n%s", differences, scenario.Code())
				}
			}
		})
	}
	t.Logf("%d of %d entries, %.1f per second", played, entry, float64(played)/time.Since(begin).Seconds())
}
