package main

import (
	"bytes"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/test/lab"
)

// The demo runs every example, each once.
func TestWavesAreTheExamples(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "manifests", "examples", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, file := range files {
		if name := strings.TrimSuffix(filepath.Base(file), ".yaml"); name != "kustomization" {
			want = append(want, name)
		}
	}
	if diff := cmp.Diff(want, slices.Sorted(slices.Values(slices.Concat(waves...)))); diff != "" {
		t.Errorf("examples (-manifests +waves):\n%s", diff)
	}
}

func TestPrintTable(t *testing.T) {
	differs := errors.New("GPU-2 is allocated, and not seen")
	right := lab.Row{Pod: "right", Node: "h100", Claims: []string{"one"}, Allocated: []string{"gpu-0"}, Seen: "/dev/nvidia0"}
	wrong := lab.Row{Pod: "wrong", Node: "h100", Claims: []string{"two", "three"}, Allocated: []string{"gpu-1", "gpu-2"}, Seen: "/dev/nvidia1", Err: differs}
	wide := lab.Row{Pod: "wide", Node: "b200", Claims: []string{"many"}, Seen: "/dev/nvidia0", Allocated: []string{
		"gpu-0000-1b-00-0", "gpu-0000-43-00-0", "gpu-0000-52-00-0", "gpu-0000-61-00-0",
	}}
	for name, tc := range map[string]struct {
		rows []lab.Row
		want string
		err  error
	}{
		"what is seen is what is allocated": {
			rows: []lab.Row{right},
			want: `
POD    NODE  CLAIM  ALLOCATED  SEEN IN CONTAINER
right  h100  one    gpu-0      /dev/nvidia0

`,
		},
		"one row of several is not right": {
			rows: []lab.Row{wrong, right},
			want: `
POD    NODE  CLAIM      ALLOCATED    SEEN IN CONTAINER
wrong  h100  two,three  gpu-1 gpu-2  MISMATCH /dev/nvidia1
right  h100  one        gpu-0        /dev/nvidia0

`,
			err: differs,
		},
		"a wide cell has lines": {
			rows: []lab.Row{wide},
			want: `
POD   NODE  CLAIM  ALLOCATED                                           SEEN IN CONTAINER
wide  b200  many   gpu-0000-1b-00-0 gpu-0000-43-00-0 gpu-0000-52-00-0  /dev/nvidia0
                   gpu-0000-61-00-0                                    

`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := printTable(&out, tc.rows); !errors.Is(err, tc.err) || (err == nil) != (tc.err == nil) {
				t.Errorf("error %v, want %v", err, tc.err)
			} else if err != nil && !strings.Contains(err.Error(), "wrong") {
				t.Errorf("error %q does not name the pod", err)
			}
			if diff := cmp.Diff(tc.want, out.String()); diff != "" {
				t.Errorf("table (-want +got):\n%s", diff)
			}
		})
	}
}
