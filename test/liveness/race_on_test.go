//go:build race

package liveness

const raceDetector = true
