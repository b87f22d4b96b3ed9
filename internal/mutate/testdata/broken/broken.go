// Package broken is code whose tests fail.
package broken

// One is two.
func One() int { return 2 }
