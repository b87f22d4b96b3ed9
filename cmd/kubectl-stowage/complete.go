// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/snapshot"
)

// plainName are the names that an API server takes, and what is made of them. A file may have others, and shells expand some of what they
// are offered.
var plainName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*=?$`)

// offer completes what is typed by names of the snapshot file, or of the cluster, of which it lists the resources alone. The standard input
// is the terminal then, so it offers nothing of a file that is to come from there.
func (c *cli) offer(names func(*snapshot.Snapshot) []string, resources ...string) cobra.CompletionFunc {
	return func(command *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
		if c.file == "-" {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		s, err := c.read(command.Context(), resources...)
		if err != nil {
			fmt.Fprintln(c.ErrOut, "error:", printable(err.Error())) // a shell's script drops it, who calls __complete reads it
			return nil, cobra.ShellCompDirectiveError
		}
		all := slices.DeleteFunc(names(s), func(name string) bool { return !strings.HasPrefix(name, typed) || !plainName.MatchString(name) })
		slices.Sort(all)
		all = slices.Compact(all)
		directive := cobra.ShellCompDirectiveNoFileComp
		if len(all) > 0 && strings.HasSuffix(all[0], "=") { // a number follows
			directive |= cobra.ShellCompDirectiveNoSpace
		}
		return all, directive
	}
}

// firstArgument offers nothing after the only argument.
func firstArgument(offer cobra.CompletionFunc) cobra.CompletionFunc {
	return func(command *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return offer(command, args, typed)
	}
}

func (c *cli) podNames(s *snapshot.Snapshot) (names []string) {
	for _, pod := range s.Pods {
		if pod.Namespace == c.namespace() {
			names = append(names, pod.Name)
		}
	}
	return names
}

func nodeNames(s *snapshot.Snapshot) (names []string) {
	for _, node := range s.Nodes {
		names = append(names, node.Name)
	}
	return names
}

// namespaceNames are those that have something, too: not everybody may list namespaces.
func namespaceNames(s *snapshot.Snapshot) (names []string) {
	for _, ns := range s.Namespaces {
		names = append(names, ns.Name)
	}
	for _, pod := range s.Pods {
		names = append(names, pod.Namespace)
	}
	for _, claim := range s.ResourceClaims {
		names = append(names, claim.Namespace)
	}
	return names
}

// profiles are what --add-node takes before its number.
func profiles(s *snapshot.Snapshot) (all []string) {
	for _, node := range s.Nodes {
		all = append(all, node.Name+"=")
		if kind := node.Labels[v1.LabelInstanceTypeStable]; kind != "" {
			all = append(all, kind+"=")
		}
	}
	return all
}
