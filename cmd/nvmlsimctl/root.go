// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/install"
)

// defaultSocket is where the node agent has it with its default --state-dir.
const defaultSocket = "/var/lib/stowage/sim/" + nvmlsim.ControlSocket

// client is what all commands but serve need.
type client struct{ socket string }

func newCommand(env func(string) (string, bool)) *cobra.Command {
	c := &client{socket: defaultSocket}
	if socket, ok := env("NVMLSIM_SOCKET"); ok {
		c.socket = socket
	}
	root := &cobra.Command{
		Use:   "nvmlsimctl",
		Short: "Makes things happen to the simulated GPUs of a node",
		Long: "Makes things happen to the simulated GPUs of a node. GPUs are named by index in the profile or by UUID.\n" +
			"The node agent serves the socket; without one, \"nvmlsimctl serve\" does.",
		SilenceUsage: true, SilenceErrors: true,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentFlags().StringVar(&c.socket, "socket", c.socket,
		"control socket of the simulated machine; NVMLSIM_SOCKET in the environment if not given")
	root.AddCommand(c.gpuCommands(), c.procCommands(), c.clientCommands(), c.driverCommands(),
		c.migCommands(), c.stateCommand(), newServeCommand(), newLibraryCommand())
	root.AddCommand(c.faultCommands()...)
	return root
}

// send runs a command on the machine.
func (c *client) send(cmd *cobra.Command, command nvmlsim.Command) (nvmlsim.Result, error) {
	result, err := nvmlsim.Control(cmd.Context(), c.socket, command)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) { // a socket may outlive who served it
		err = fmt.Errorf("--socket %s: nobody serves it: start the node agent with simulated GPUs, or nvmlsimctl serve: %w", c.socket, err)
	}
	return result, inWordsOfUsage(err)
}

// usageWords are the arguments and flags that stand for the fields of the machine's commands.
var usageWords = map[string]string{
	"gpu": "GPU", "pid": "PID", "code": "CODE", "celsius": "CELSIUS", "watts": "WATTS", "action": "ACTION", "mode": "MODE",
	"time": "TIME", "reasons": "REASON", "daemon": "DAEMON", "profile": "PROFILE", "link.generation": "GENERATION", "link.width": "WIDTH",
	"kind": "--kind", "instance": "--instance", "memoryMiB": "--memory-mib", "start": "--start", "compute": "--compute",
	"replays": "--replays", "version": "--version", "corrected": "--corrected", "uncorrected": "--uncorrected",
	"corrected, uncorrected": "--corrected, --uncorrected",
}

// positional are fields that are arguments in one command and flags in others.
var positional = map[string]string{"leak memoryMiB": "MIB", "mig destroy instance": "INSTANCE"}

// machineError is "command: field: the rest".
var machineError = regexp.MustCompile(`^([a-z -]+): ([a-zA-Z.]+(?:, [a-z]+)?): (.*)$`)

// inWordsOfUsage names what was wrong by the words of the usage line. What means nothing to the machine has a word here.
func inWordsOfUsage(err error) error {
	if err == nil {
		return nil
	}
	match := machineError.FindStringSubmatch(err.Error())
	if match == nil {
		return err
	}
	word := cmp.Or(positional[match[1]+" "+match[2]], usageWords[match[2]])
	if word == "" {
		return err
	}
	rest := strings.Replace(match[3], ", or nothing for the default", ", or default", 1)
	rest = strings.Replace(rest, ", or nothing", ", or none", 1)
	return fmt.Errorf("%s: %s %s", match[1], word, rest)
}

// arguments refuses a number of arguments that the command does not take, and shows its usage line.
func arguments(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return fmt.Errorf("%d arguments: want %s", len(args), strings.TrimSuffix(cmd.UseLine(), " [flags]"))
		}
		return nil
	}
}

// action is a command with arguments that are told from each other by place.
func (c *client) action(use, short string, args int, make func(args []string) (nvmlsim.Command, error)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: arguments(cobra.ExactArgs(args)),
		RunE: func(cmd *cobra.Command, args []string) error {
			command, err := make(args)
			if err != nil {
				return err
			}
			_, err = c.send(cmd, command)
			return err
		},
	}
}

// onGPU is an action with a GPU for its only argument.
func (c *client) onGPU(verb, short string, make func(gpu string) nvmlsim.Command) *cobra.Command {
	return c.action(verb+" GPU", short, 1, func(args []string) (nvmlsim.Command, error) { return make(args[0]), nil })
}

// group holds commands about one thing.
func group(name, short string, commands ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	g.AddCommand(commands...)
	return g
}

// newLibraryCommand returns "library", which needs no machine.
func newLibraryCommand() *cobra.Command {
	var driver string
	cmd := &cobra.Command{
		Use: "library --driver VERSION FROM TO",
		Short: "Write the simulated libnvidia-ml.so.1 as the one of a driver version: it lacks what that lacks, and serves no other " +
			"kernel driver",
		Args: arguments(cobra.ExactArgs(2)),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := install.Library(args[0], args[1], driver); err != nil {
				return fmt.Errorf("library: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&driver, "driver", "", "version of the driver, such as 570.172.08")
	if err := cmd.MarkFlagRequired("driver"); err != nil {
		panic(err) // the flag is defined above
	}
	return cmd
}

// newServeCommand returns "serve", which stands in for the agent's process.
func newServeCommand() *cobra.Command {
	var profile, node, folder string
	cmd := &cobra.Command{
		Use:   "serve --profile NAME --node-name NODE --dir FOLDER",
		Short: "Serve a machine's control socket until stopped, where no node agent does",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := nvmlsim.LoadProfile(profile)
			if err != nil {
				return fmt.Errorf("--profile: %w", err)
			}
			machine, err := nvmlsim.OpenMachine(p, node, folder)
			if err != nil {
				return fmt.Errorf("--dir: %w", err)
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "serving %s since %s\n", filepath.Join(folder, nvmlsim.ControlSocket), time.Now().Format(time.RFC3339))
			return machine.ServeControl(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&profile, "profile", "", "profile of the machine, a name or a file")
	cmd.Flags().StringVar(&node, "node-name", "", "name of the node, from which the GPUs have their UUIDs")
	cmd.Flags().StringVar(&folder, "dir", "", "folder that holds the machine's state")
	for _, required := range []string{"profile", "node-name", "dir"} {
		if err := cmd.MarkFlagRequired(required); err != nil {
			panic(err) // the flag is defined above
		}
	}
	return cmd
}
