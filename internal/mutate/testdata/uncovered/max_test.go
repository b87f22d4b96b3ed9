package uncovered

import "testing"

func TestTheSecondIsLarger(t *testing.T) {
	if got := Max(1, 2); got != 2 {
		t.Errorf("Max(1, 2) = %d", got)
	}
}

func TestNothing(*testing.T) { Max(4, 3) }
