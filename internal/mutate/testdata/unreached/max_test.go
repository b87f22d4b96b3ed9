package unreached

import (
	"os"
	"testing"
)

// TestOther fails if it is run with a mutant: none makes a difference to it.
func TestOther(t *testing.T) {
	if id := os.Getenv("STOWAGE_MUTANT"); id == "1" {
		t.Error("run with mutant 1")
	}
}

// TestPositive fails if it is run with a mutant that makes no difference to it.
func TestPositive(t *testing.T) {
	if id := os.Getenv("STOWAGE_MUTANT"); id == "3" || id == "5" {
		t.Errorf("run with mutant %s", id)
	}
	if !Positive(1) {
		t.Error("1 is not positive")
	}
}

func TestTwice(t *testing.T) {
	asked := 0
	if !Twice(func() bool { asked++; return true }) || asked != 2 {
		t.Errorf("asked %d times", asked)
	}
}

func TestMax(t *testing.T) {
	if got := Max(1, 2); got != 2 {
		t.Errorf("Max(1, 2) = %d", got)
	}
}
