package random

import (
	"flag"
	"os"
	"testing"
)

var (
	seed      = flag.Int("seed", 1, "the first one")
	histories = flag.Int("histories", 1, "how many")
)

// Seed 2 fails whatever the code does, and seed 3 in the first of all runs.
func TestRandom(t *testing.T) {
	for s := *seed; s < *seed+*histories; s++ {
		if got := Max(s, 3); got != max(s, 3) || s == 2 || s == 3 && os.Mkdir(os.Getenv("FAILED_ONCE"), 0o700) == nil {
			t.Errorf("seed %d: %d", s, got)
			return
		}
	}
}
