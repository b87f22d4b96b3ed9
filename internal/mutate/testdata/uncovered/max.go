// Package uncovered is code with tests that miss a part of it.
package uncovered

// Max returns the larger one.
func Max(a, b int) int {
	if a > b {
		return a
	}
	return b
}
