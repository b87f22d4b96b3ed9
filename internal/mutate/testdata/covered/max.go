// Package covered is code whose tests notice whatever can be noticed.
package covered

// Max returns the larger one.
func Max(a, b int) int {
	if a > b {
		return a
	}
	return b
}
