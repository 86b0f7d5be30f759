"""What a project begins with: the files around its one component."""

import dataclasses
import json
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework and its plugin of Vite.

    Attributes:
        title: its name.
        versions: of its packages.
        component: path of the component that a task asks for.
        root: selector of the element that it is mounted at.
        is_mounted: JavaScript of a function that tells of that element whether the
            framework has mounted something there.
        entry: path and text of the module that mounts it.
        config: text of vite.config.js.
    """

    title: str
    versions: Mapping[str, str]
    component: str
    root: str
    is_mounted: str
    entry: tuple[str, str]
    config: str

    def files(self) -> dict[str, str]:
        """Returns the files of a project without its component."""
        path, text = self.entry
        package = {
            "name": "page",
            "private": True,
            "version": "0.0.0",
            "type": "module",
            "scripts": {"build": "vite build"},
            "dependencies": {**self.versions},
        }
        return {
            "package.json": json.dumps(package, indent=2) + "\n",
            "vite.config.js": self.config,
            "index.html": (
                '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
                f'<title>Page</title></head>\n<body>\n<div id="{self.root[1:]}"></div>'
                f'\n<script type="module" src="/{path}"></script>\n</body>\n</html>\n'
            ),
            path: text,
        }


_VITE = {"vite": "7.3.8"}
ALL: Mapping[str, Framework] = {
    "react": Framework(
        title="React",
        versions={
            "react": "19.3.1",
            "react-dom": "19.3.1",
            "@vitejs/plugin-react": "5.2.0",
            **_VITE,
        },
        component="src/App.jsx",
        root="#root",
        is_mounted="e => Object.keys(e).some(k => k.startsWith('__reactContainer'))",
        entry=(
            "src/main.jsx",
            "import { createRoot } from 'react-dom/client';\n"
            "import App from './App.jsx';\n\n"
            "createRoot(document.getElementById('root')).render(<App />);\n",
        ),
        config="import react from '@vitejs/plugin-react';\n\n"
        "export default { plugins: [react()] };\n",
    ),
    "vue": Framework(
        title="Vue",
        versions={"vue": "3.5.45", "@vitejs/plugin-vue": "6.0.11", **_VITE},
        component="src/App.vue",
        root="#app",
        is_mounted="e => Boolean(e.__vue_app__)",
        entry=(
            "src/main.js",
            "import { createApp } from 'vue';\nimport App from './App.vue';\n\n"
            "createApp(App).mount('#app');\n",
        ),
        config="import vue from '@vitejs/plugin-vue';\n\n"
        "export default { plugins: [vue()] };\n",
    ),
}
