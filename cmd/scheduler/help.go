// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"stowage.dev/stowage/pkg/plugins/config"
)

// helpWidth is where the texts of arguments break.
const helpWidth = 100

// explainArgs has --help end with the arguments of DeviceClaims, which stand in the file that --config names.
func explainArgs(cmd *cobra.Command) {
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		help(cmd, args)
		fmt.Fprint(cmd.OutOrStdout(), argsHelp())
	})
}

// argsHelp explains every argument of DeviceClaims.
func argsHelp() string {
	var b strings.Builder
	b.WriteString(`
DeviceClaimsArgs, the arguments of the plugin DeviceClaims:

  They stand in the file of --config, in profiles[].pluginConfig[] with name DeviceClaims, under args.
  "fence.timeout" is the field timeout below fence. Durations have a unit: 300ms, 10s, 10m.

`)
	for _, field := range config.Fields() {
		fmt.Fprintf(&b, "    %s %s", field.Path, field.Kind)
		if field.Default != "" {
			fmt.Fprintf(&b, " (default %s)", field.Default)
		}
		b.WriteString("\n")
		for _, line := range wrapped(field.Doc, helpWidth-16) {
			b.WriteString(strings.Repeat(" ", 16) + line + "\n")
		}
	}
	return b.String()
}

// wrapped breaks a text into lines of at most so many columns.
func wrapped(text string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return append(lines, line)
}
