package unreached

import (
	"os"
	"testing"
)

// TestOther fails if it is run with a mutant: it does not come by any.
func TestOther(t *testing.T) {
	if id := os.Getenv("STOWAGE_MUTANT"); id == "1" {
		t.Error("run with mutant 1")
	}
}

func TestMax(t *testing.T) {
	if got := Max(1, 2); got != 2 {
		t.Errorf("Max(1, 2) = %d", got)
	}
}
