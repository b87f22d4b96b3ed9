// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"stowage.dev/stowage/internal/version"
	"stowage.dev/stowage/pkg/snapshot"
)

// cli is what all commands have in common.
type cli struct {
	genericiooptions.IOStreams
	cluster   *genericclioptions.ConfigFlags
	file      string
	output    string
	noHeaders bool
	color     string
	watch     bool
}

func newCommand(streams genericiooptions.IOStreams) *cobra.Command {
	c := &cli{IOStreams: streams, cluster: genericclioptions.NewConfigFlags(true)}
	c.cluster.WithWrapConfigFn(func(config *rest.Config) *rest.Config {
		// Lists of a large cluster are a third of the size, and quicker to read.
		config.AcceptContentTypes, config.ContentType = "application/vnd.kubernetes.protobuf,application/json",
			"application/vnd.kubernetes.protobuf"
		config.QPS, config.Burst = 50, 100
		return config
	})
	root := &cobra.Command{
		Use:   "kubectl-stowage",
		Short: "Who has which GPU, why a pod waits, and what would change that",
		Long: `Who has which GPU, why a pod waits, and what would change that.

Reads the cluster by your kubeconfig, or a file that 'snapshot' has written, and writes nothing. It shows the devices of any DRA
driver and the pods of any scheduler; nothing of Stowage has to run in the cluster.

Exit codes: 0 done; 1 the cluster or a file could not be read; 2 wrong flags or arguments; 3 the answer is no.`,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl stowage"},
		Version:       version.Release(),
		SilenceErrors: true, SilenceUsage: true,
		PersistentPreRunE: func(*cobra.Command, []string) error { return c.check() },
	}
	root.SetOut(streams.Out)
	root.SetErr(streams.ErrOut)
	root.SetIn(streams.In)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	flags := root.PersistentFlags()
	c.cluster.AddFlags(flags)
	flags.StringVar(&c.file, "snapshot", "", "read this file instead of the cluster; - is the standard input")
	flags.StringVar(&c.color, "color", "auto", "auto (on terminals, unless NO_COLOR is set), always, never")
	_ = root.RegisterFlagCompletionFunc("namespace", c.offer(namespaceNames, "namespaces", "pods", "resourceclaims"))
	root.AddCommand(c.snapshotCommand(), c.gpusCommand(), c.claimsCommand(), c.whyCommand(), c.whatifCommand(), c.topoCommand(),
		c.fragCommand(), c.doctorCommand(), c.mapCommand())
	for _, command := range root.Commands() {
		if check := command.Args; check != nil {
			command.Args = func(command *cobra.Command, args []string) error {
				if err := check(command, args); err != nil {
					return usageError{err}
				}
				return nil
			}
		}
	}
	return root
}

// none is for commands without arguments. cobra.NoArgs would speak of an unknown command.
func none(command *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%s: Too many: %q: want no arguments; flags are listed by --help", command.Name(), args)
	}
	return nil
}

// one is for commands with one argument.
func one(what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch len(args) {
		case 0:
			return fmt.Errorf("%s: Required value", what)
		case 1:
			return nil
		}
		return fmt.Errorf("%s: Too many: %q: want one", what, args)
	}
}

// check looks at the flags that all commands have.
func (c *cli) check() error {
	if outputs := []string{"", "table", "wide", "json", "yaml"}; !slices.Contains(outputs, c.output) {
		return usageError{fmt.Errorf("--output: Unsupported value: %q: want %s", c.output, strings.Join(outputs[1:], ", "))}
	}
	if colors := []string{"auto", "always", "never"}; !slices.Contains(colors, c.color) {
		return usageError{fmt.Errorf("--color: Unsupported value: %q: want %s", c.color, strings.Join(colors, ", "))}
	}
	if c.watch && c.file != "" {
		return usageError{errors.New("--watch: a snapshot file does not change")}
	}
	return nil
}

// printFlags are those of commands that print.
func (c *cli) printFlags(command *cobra.Command, watch bool) {
	command.Flags().StringVarP(&c.output, "output", "o", "", "table, wide, json, yaml")
	_ = command.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "wide", "json", "yaml"},
		cobra.ShellCompDirectiveNoFileComp))
	command.Flags().BoolVar(&c.noHeaders, "no-headers", false, "print rows alone, without headers and totals")
	if watch {
		command.Flags().BoolVarP(&c.watch, "watch", "w", false, "print what changes, until interrupted")
	}
}

// read returns the snapshot file, or the cluster as it is. Of a cluster, resources are what is listed; none are all.
func (c *cli) read(ctx context.Context, resources ...string) (*snapshot.Snapshot, error) {
	switch c.file {
	case "":
		client, err := c.client()
		if err != nil {
			return nil, err
		}
		s, err := snapshot.Take(ctx, client, resources...)
		if err != nil {
			return nil, err
		}
		for _, missing := range s.Missing {
			fmt.Fprintf(c.ErrOut, "warning: %s could not be listed: %s\n", missing.Resource, missing.Reason)
		}
		return s, nil
	case "-":
		s, err := snapshot.Read(c.In)
		if err != nil {
			return nil, fmt.Errorf("snapshot in the standard input: %w", err)
		}
		return s, nil
	}
	file, err := os.Open(c.file)
	if err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	defer file.Close()
	s, err := snapshot.Read(file)
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", c.file, err)
	}
	return s, nil
}

func (c *cli) client() (kubernetes.Interface, error) {
	config, err := c.cluster.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}

// namespace is that of the flags, the kubeconfig, or "default".
func (c *cli) namespace() string {
	if c.file != "" { // what the kubeconfig says is about another cluster
		if ns := *c.cluster.Namespace; ns != "" {
			return ns
		}
		return "default"
	}
	ns, _, err := c.cluster.ToRawKubeConfigLoader().Namespace()
	if err != nil || ns == "" {
		return "default"
	}
	return ns
}

func (c *cli) snapshotCommand() *cobra.Command {
	hash := false
	command := &cobra.Command{
		Use: "snapshot > FILE", Short: "Write what scheduling depends on as one file",
		Long: `Write what scheduling depends on as one file: nodes, pods, claims, slices, classes and what they refer to; and how schedulers
and node agents are installed, as far as you may read it.

It has no environment, command, image or annotation of a container, and no driver's parameters, but images of schedulers, node agents and
device plugins, and arguments of Stowage and kube-scheduler. With --hash-names it has no names that users gave either, nor what is
installed, but labels of nodes, device attributes, classes and drivers as they are. Every other command reads it with --snapshot FILE.`,
		Example: "  kubectl stowage snapshot --hash-names | gzip > cluster.json.gz\n  kubectl stowage gpus --snapshot cluster.json.gz",
		Args:    none,
		RunE: func(command *cobra.Command, _ []string) error {
			s, err := c.readInstallation(command.Context())
			if err != nil {
				return err
			}
			if hash {
				if s, err = s.Hash(); err != nil {
					return err
				}
			}
			return s.Write(c.Out)
		},
	}
	command.Flags().BoolVar(&hash, "hash-names", false,
		"replace names of nodes, namespaces, pods, claims and volumes, and labels of pods; the key is forgotten")
	return command
}
