// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"fmt"
	"net"
	"testing"
)

func TestFreePortsAreFreeAndGivenOnce(t *testing.T) {
	seen := map[int]bool{}
	for range 100 {
		port, err := FreePort()
		if err != nil {
			t.Fatal(err)
		}
		if seen[port] {
			t.Errorf("port %d was given twice", port)
		}
		seen[port] = true
		listener, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
	}
}

func TestPortsThatTheKernelAssignsAreNotChosen(t *testing.T) {
	for name, tc := range map[string]struct {
		low, high, first, last int
	}{
		"Linux's default":                      {32768, 60999, 20000, 29999},
		"a range that begins early":            {25000, 60999, 20000, 24999},
		"a range that leaves ports behind":     {1024, 22000, 22001, 29999},
		"a range over all that is preferred":   {15000, 60999, 61000, 65535},
		"a range up to the end":                {10000, 65535, 1024, 9999},
		"a range that leaves nothing":          {1024, 65535, 20000, 29999},
		"a range that leaves far from enough":  {20500, 65535, 1024, 20499},
		"a range that leaves just what it may": {21000, 65535, 20000, 20999},
	} {
		t.Run(name, func(t *testing.T) {
			if first, last := quietPorts(tc.low, tc.high); first != tc.first || last != tc.last {
				t.Errorf("ports %d to %d, want %d to %d", first, last, tc.first, tc.last)
			}
		})
	}
}
