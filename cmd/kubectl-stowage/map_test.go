package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/cli-runtime/pkg/genericiooptions"
)

// The page tells of a pod what the command why prints.
func TestTheMapsWhyIsWhatWhyPrints(t *testing.T) {
	c := &cli{file: example(t), output: "wide"}
	s, err := c.read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	a := &asker{cli: c, options: &mapOptions{}, last: s}
	for pod, name := range map[string]string{"picky": "why-holders", "large": "why-never"} {
		namespace := map[string]string{"picky": "team-b", "large": "team-a"}[pod]
		lines, err := a.why(t.Context(), namespace, pod)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join("testdata", name+".golden"))
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, line := range lines {
			got += strings.Repeat("  ", line.Indent) + line.Text + "\n"
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Error(diff)
		}
	}
	if _, err := a.why(t.Context(), "team-a", "nobody"); err == nil || err.Error() != "pod team-a/nobody: there is none" {
		t.Errorf("%v", err)
	}
}

// The map ends with 0 when it is interrupted, and prints its address first.
func TestTheMapEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out printed
	out.found = cancel
	var errOut bytes.Buffer
	if got := run(ctx, []string{"map", "--open=false", "--snapshot", example(t)}, genericiooptions.IOStreams{Out: &out, ErrOut: &errOut}); got != 0 {
		t.Errorf("exit code %d, %s", got, errOut.String())
	}
	if !strings.Contains(out.String(), "http://127.0.0.1:") || !strings.Contains(out.String(), "/#token=") {
		t.Errorf("%s", out.String())
	}
}

// printed calls found when something is written.
type printed struct {
	bytes.Buffer
	found func()
}

func (p *printed) Write(b []byte) (int, error) {
	defer p.found()
	return p.Buffer.Write(b)
}
