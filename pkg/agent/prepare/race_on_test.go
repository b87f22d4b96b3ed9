//go:build race

package prepare_test

const raceDetector = true
