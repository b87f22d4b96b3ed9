//go:build !race

package compat

const raceDetector = false
