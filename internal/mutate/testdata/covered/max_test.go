package covered

import "testing"

func TestMax(t *testing.T) {
	for _, tc := range [][3]int{{1, 2, 2}, {4, 3, 4}} {
		if got := Max(tc[0], tc[1]); got != tc[2] {
			t.Errorf("Max(%d, %d) = %d, want %d", tc[0], tc[1], got, tc[2])
		}
	}
}

func TestMaxOfEqualOnes(t *testing.T) {
	if got := Max(5, 5); got != 5 {
		t.Errorf("Max(5, 5) = %d", got)
	}
}
