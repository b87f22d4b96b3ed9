package broken

import "testing"

func TestOne(t *testing.T) {
	if One() != 1 {
		t.Error("one is not one")
	}
}
