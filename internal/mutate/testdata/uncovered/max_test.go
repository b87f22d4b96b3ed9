package uncovered

import (
	"testing"

	"pgregory.net/rapid"
)

func TestTheSecondIsLarger(t *testing.T) {
	if got := Max(1, 2); got != 2 {
		t.Errorf("Max(1, 2) = %d", got)
	}
}

func TestNothing(*testing.T) { Max(4, 3) }

// What rapid writes about a failure does not stay.
func TestZero(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		if n := rapid.IntRange(1, 9).Draw(t, "n"); Max(0, n) == 0 {
			t.Fatalf("Max(0, %d) = 0", n)
		}
	})
}
