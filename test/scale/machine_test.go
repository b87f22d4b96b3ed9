// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestProcessorTimeIsRead(t *testing.T) {
	const stat = "4711 (a (b) c) S 12 4711 4711 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 9 0 100 1000 100 18446744073709551615"
	name, pid, parent, used, err := parseStat([]byte(stat))
	if err != nil || name != "a (b) c" || pid != 4711 || parent != 12 || used != 3*time.Second {
		t.Errorf("read %q, pid %d, parent %d, %s, error %v", name, pid, parent, used, err)
	}
	for _, text := range []string{"", "4711 (a) S 1", "x (a) S 12 4711 4711 0 -1 4194304 100 0 0 0 250 50 0"} {
		if _, _, _, _, err := parseStat([]byte(text)); err == nil {
			t.Errorf("%q gives no error", text)
		}
	}
}

func TestPeakMemoryIsThatOfTheProcess(t *testing.T) {
	got, err := parsePeak([]byte("Name:\tscheduler\nVmPeak:\t 9999 kB\nVmHWM:\t  1024 kB\nVmRSS:\t 512 kB\n"))
	if err != nil || got != 1<<20 {
		t.Errorf("read %d, error %v", got, err)
	}
	if _, err := parsePeak([]byte("Name:\tkthreadd\n")); err == nil {
		t.Error("a status without memory gives no error")
	}
	if own, err := peakMemory(os.Getpid()); err != nil || own < 1<<20 {
		t.Errorf("this process has had %d bytes at most, error %v", own, err)
	}
}

func TestAProcessThatIsStartedAgainHasItsOwnProcessorTime(t *testing.T) {
	before := cpuTimes{{1, "etcd"}: time.Second, {2, "scheduler"}: 10 * time.Second}
	after := cpuTimes{{1, "etcd"}: 3 * time.Second, {3, "scheduler"}: 4 * time.Second}
	want := map[string]time.Duration{"etcd": 2 * time.Second, "scheduler": 4 * time.Second}
	if diff := cmp.Diff(want, after.since(before)); diff != "" {
		t.Errorf("used (-want +got):\n%s", diff)
	}
	if got := after.of(3); got != 4*time.Second || after.of(2) != 0 {
		t.Errorf("process 3 has used %s, and process 2, which has ended, %s", got, after.of(2))
	}
}
