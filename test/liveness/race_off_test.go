//go:build !race

package liveness

const raceDetector = false
