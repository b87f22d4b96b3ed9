// Package unreached is code of which tests never run a part.
package unreached

func Max(a, b int) int { return max(a, b) }

// Min is called by nobody.
func Min(a, b int) int { return min(a, b) }

// Positive is only asked for positive numbers.
func Positive(n int) bool { return n > 0 }

// Twice asks twice, and is only asked where both answers are yes.
func Twice(ask func() bool) bool { return ask() && ask() }
