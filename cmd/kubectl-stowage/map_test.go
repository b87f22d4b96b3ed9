// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

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

// Without a cluster no address is printed.
func TestTheMapOfNoCluster(t *testing.T) {
	var out, errOut bytes.Buffer
	args := []string{"map", "--open=false", "--server", "http://127.0.0.1:1"}
	if got := run(t.Context(), args, genericiooptions.IOStreams{Out: &out, ErrOut: &errOut}); got != exitError {
		t.Errorf("exit code %d, want %d", got, exitError)
	}
	if out.Len() > 0 || !strings.HasPrefix(errOut.String(), "error: list resourceslices.resource.k8s.io: ") {
		t.Errorf("it prints %q, and tells %q", out.String(), errOut.String())
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

// What does not go together is said before anything is served.
func TestFlagsOfAMapForOthers(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
		code int
	}{
		"a file":                 {[]string{"--listen=:0", "--snapshot", example(t)}, "--listen: needs a cluster", exitUsage},
		"a port of its own":      {[]string{"--listen=:0", "--port=1"}, "leave --port and --open out", exitUsage},
		"no port":                {[]string{"--listen=here"}, `--listen: Invalid value: "here"`, exitUsage},
		"half a certificate":     {[]string{"--listen=:0", "--tls-cert-file=a"}, "one needs the other", exitUsage},
		"certificate for nobody": {[]string{"--tls-cert-file=a", "--tls-private-key-file=b"}, "needs --listen", exitUsage},
		"no such certificate":    {[]string{"--listen=:0", "--tls-cert-file=a", "--tls-private-key-file=b"}, "--tls-cert-file: open a", exitError},
	} {
		t.Run(name, func(t *testing.T) {
			var out, errOut bytes.Buffer
			got := run(t.Context(), append([]string{"map"}, tc.args...), genericiooptions.IOStreams{Out: &out, ErrOut: &errOut})
			if got != tc.code || !strings.Contains(errOut.String(), tc.want) {
				t.Errorf("exit code %d, %q, want %d and %q", got, errOut.String(), tc.code, tc.want)
			}
		})
	}
}
