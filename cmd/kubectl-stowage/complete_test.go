// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"stowage.dev/stowage/pkg/snapshot"
)

// A shell offers what the snapshot has: its pods, nodes, namespaces, and what else an argument or a flag takes.
func TestCompletion(t *testing.T) {
	const (
		noFiles = ":4"
		noSpace = ":6" // nor files
		failed  = ":1"
	)
	for name, tc := range map[string]struct {
		typed []string // the last one is not complete
		want  string
	}{
		"pods of the namespace":        {[]string{"why", "-n", "team-b", ""}, "batch picky serve urgent " + noFiles},
		"pods that begin with":         {[]string{"why", "-n", "team-b", "s"}, "serve " + noFiles},
		"pods of the default one":      {[]string{"why", ""}, noFiles},
		"nothing after the pod":        {[]string{"why", "-n", "team-b", "serve", ""}, noFiles},
		"nodes of topo":                {[]string{"topo", ""}, "worker-0 worker-1 worker-2 " + noFiles},
		"nothing after the node":       {[]string{"topo", "worker-0", ""}, noFiles},
		"nodes of gpus":                {[]string{"gpus", "--node", "worker-2"}, "worker-2 " + noFiles},
		"nodes to drain":               {[]string{"whatif", "--drain", ""}, "worker-0 worker-1 worker-2 " + noFiles},
		"nodes to add":                 {[]string{"whatif", "--add-node", ""}, "p5= worker-0= worker-1= worker-2= " + noSpace},
		"pods to delete":               {[]string{"whatif", "-n", "team-c", "--delete", ""}, "guarded unclaimed " + noFiles},
		"namespaces":                   {[]string{"claims", "-n", ""}, "team-a team-b team-c " + noFiles},
		"namespaces before the pod":    {[]string{"why", "--namespace", "team-c"}, "team-c " + noFiles},
		"states":                       {[]string{"gpus", "--state", ""}, "free held shared partitioned tainted incomplete gone " + noFiles},
		"outputs":                      {[]string{"frag", "-o", ""}, "table wide json yaml " + noFiles},
		"a file that cannot be opened": {[]string{"why", "--snapshot", "/nowhere", ""}, failed},
		"another that cannot":          {[]string{"topo", "--snapshot", "/nowhere/either", ""}, failed},
	} {
		t.Run(name, func(t *testing.T) {
			var out, errOut bytes.Buffer
			args := append([]string{"__complete", tc.typed[0], "--snapshot", example(t)}, tc.typed[1:]...)
			if code := run(t.Context(), args, genericiooptions.IOStreams{In: strings.NewReader(""), Out: &out, ErrOut: &errOut}); code != 0 {
				t.Errorf("exit code %d: %s", code, &errOut)
			}
			if diff := cmp.Diff(tc.want, strings.Join(strings.Fields(out.String()), " ")); diff != "" {
				t.Errorf("%s%s", diff, &errOut)
			}
		})
	}
}

// A shell expands some of what it is offered, and a file may be from somebody else: names that no API server takes are not offered.
func TestCompletionOffersNamesOfKubernetesAlone(t *testing.T) {
	hostile := []string{"$(touch x)", "`touch x`", "a;b", "a b", "a\tb", "a\nb", "\x1b[31mred", "_activeHelp_ hi", ":0", "-A", "a'b", `a"b`, "a\\b", ""}
	objects := snapshot.Objects{Namespaces: []*v1.Namespace{{ObjectMeta: metav1.ObjectMeta{Name: "default", UID: "ns"}}}}
	for i, name := range append([]string{"web-0", "10.0.0.7"}, hostile...) {
		if name == "" {
			continue
		}
		meta := metav1.ObjectMeta{Name: name, UID: types.UID(name)}
		node := &v1.Node{ObjectMeta: meta}
		node.Labels = map[string]string{v1.LabelInstanceTypeStable: hostile[i%len(hostile)]}
		objects.Nodes = append(objects.Nodes, node)
		meta.Namespace = "default"
		objects.Pods = append(objects.Pods, &v1.Pod{ObjectMeta: meta})
		objects.Pods = append(objects.Pods, &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "in", Namespace: name, UID: types.UID("in " + name)}})
	}
	var content bytes.Buffer
	if err := snapshot.New(objects).Write(&content); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, content.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		typed []string
		want  string
	}{
		{[]string{"why", ""}, "10.0.0.7\nweb-0\n:4\n"},
		{[]string{"topo", ""}, "10.0.0.7\nweb-0\n:4\n"},
		{[]string{"whatif", "--add-node", ""}, "10.0.0.7=\nweb-0=\n:6\n"},
		{[]string{"claims", "-n", ""}, "10.0.0.7\ndefault\nweb-0\n:4\n"},
	} {
		var out bytes.Buffer
		args := append([]string{"__complete", tc.typed[0], "--snapshot", file}, tc.typed[1:]...)
		if code := run(t.Context(), args, genericiooptions.IOStreams{In: strings.NewReader(""), Out: &out, ErrOut: io.Discard}); code != 0 || out.String() != tc.want {
			t.Errorf("%q: exit code %d, %q, want %q", tc.typed, code, &out, tc.want)
		}
	}
}

// The standard input is the terminal while a shell completes: nobody waits for it.
func TestCompletionDoesNotReadTheTerminal(t *testing.T) {
	for _, command := range []string{"why", "topo"} {
		var out bytes.Buffer
		in := &keyboard{}
		args := []string{"__complete", command, "--snapshot", "-", ""}
		if code := run(t.Context(), args, genericiooptions.IOStreams{In: in, Out: &out, ErrOut: io.Discard}); code != 0 || in.reads > 0 || out.String() != ":4\n" {
			t.Errorf("%s: exit code %d, %q, and the terminal is read %d times", command, code, &out, in.reads)
		}
	}
}

// keyboard counts the reads, at each of which one waits.
type keyboard struct{ reads int }

func (r *keyboard) Read([]byte) (int, error) {
	r.reads++
	return 0, io.EOF
}
