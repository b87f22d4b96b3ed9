// Package sleepy is code whose tests sleep, and use no processor.
package sleepy

// Max returns the larger one.
func Max(a, b int) int {
	if a > b {
		return a
	}
	return b
}
