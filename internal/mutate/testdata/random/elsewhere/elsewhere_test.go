package elsewhere

import (
	"testing"

	random "stowage.dev/stowage/internal/mutate/testdata/random"
)

func TestTwoIsMore(t *testing.T) {
	if got := random.Max(2, 1); got != 2 {
		t.Errorf("the larger one of 2 and 1 is %d", got)
	}
}
