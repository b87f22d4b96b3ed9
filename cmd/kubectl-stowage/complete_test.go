// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/cli-runtime/pkg/genericiooptions"
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
