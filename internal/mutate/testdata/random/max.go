package random

func Max(a, b int) int {
	if a > b {
		return a
	}
	return b
}
